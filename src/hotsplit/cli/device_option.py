"""The option that commands share which compute with a model: where."""

from __future__ import annotations

import click

device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda or cuda:N; without it an NVIDIA GPU where there is one, else the CPU.",
)
