"""`hotsplit fit`: what of a model fits, before anything is bought or booted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.fit_view import fit_json, print_fit
from hotsplit.cli.fitting import fit_model, fit_task
from hotsplit.cli.options import Integer, json_option, setting_options
from hotsplit.cli.recipes_settings import given_settings
from hotsplit.plan.kv import DTYPE_BYTES


@click.command("fit")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--gpus",
    type=Integer(min=1, max=4096),
    help="GPUs; experts are cut over all. Without it 1, or the recipe's.",
)
@click.option("--vram-gib", type=float, help="Memory of one GPU, GiB. Only a recipe may stand in for it.")
@click.option("--ram-gib", help="Host memory, GiB, or of each NUMA node: 256,256. Only a recipe may stand in for it.")
@click.option("--numa", help="NUMA node of each GPU: 0,0,1,1. Gives the host's bytes per node.")
@click.option("--link", type=float, help="What one GPU reads of host memory, GB/s (10^9 bytes): turns bytes into time.")
@click.option(
    "--context", type=Integer(min=1, max=10**9), help="Tokens per sequence. Without it 32768, or the recipe's."
)
@click.option("--concurrency", type=Integer(min=1, max=10**6), help="Sequences at once. Without it 1, or the recipe's.")
@click.option("--kv-dtype", type=click.Choice([*DTYPE_BYTES]), help="Type of the KV cache; without it the model's own.")
@click.option("--draft", is_flag=True, help="Draft (MTP) layers are loaded, for speculation; they are never split.")
@click.option("--dense-gib", type=float, help="Dense weights on one GPU, GiB, where neither headers nor index tell.")
@click.option(
    "--ram-reserve-gib",
    type=float,
    default=8.0,
    show_default=True,
    help="Host memory left for the system, the engine and reading files, GiB.",
)
@click.option("--per-layer", is_flag=True, help="Print every layer's row bytes, hot rows and cold bytes.")
@setting_options("vram_reserve_gib", "dynamic")
@json_option
def command(per_layer: bool, as_json: bool, **options: Any) -> None:
    """Say what of MODEL fits hot, what the host must hold, and which number binds.

    MODEL is a folder with config.json and safetensors files, with config.json and model.safetensors.index.json, or a
    config.json alone: no weight is read, and what cannot be known is said to be unknown. Hub ids are not looked up.
    It may also be a recipe (hotsplit recipe list), which knows its model and brings its machine; what you say beats it.
    GiB are 2^30 bytes.

    The exit code is 0 whether it fits or not: the answer is the last line, and `fits` in --json (true, false, or null
    where it is open).
    """
    given = given_settings(options)
    result = fit_model(fit_task(options, given=given, environ=dict(os.environ)))
    console.say(result.weighed.notices)
    if as_json:
        console.print_json(fit_json(result))
    else:
        print_fit(result, per_layer=per_layer)
