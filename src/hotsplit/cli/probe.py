"""`hotsplit probe`: what this host really is, asked of the host itself and measured, never read off a data sheet."""

from __future__ import annotations

from pathlib import Path

import click

from hotsplit.cli import console
from hotsplit.cli.options import json_option
from hotsplit.cli.probe_view import print_probe, probe_json
from hotsplit.cli.probing import ProbeTask, probe_for

_FILE = click.Path(path_type=Path)


@click.command("probe")
@click.option("-o", "--output", type=_FILE, help="Write what was measured as a rates file, for `hotsplit forecast`.")
@click.option("--dir", "folder", type=_FILE, help="A model's folder: the disk that it lies on is measured.")
@click.option("--measure/--no-measure", default=True, help="Measure memory, links and disk; or only ask the host.")
@json_option
def command(output: Path | None, folder: Path | None, measure: bool, as_json: bool) -> None:
    """Say what this host really is: GPUs, links, NUMA nodes, memory and the limits on it, measured.

    Nothing is read off a data sheet. What cannot be found out is unknown, with the reason, and never 0.
    """
    result = probe_for(ProbeTask(output=output, folder=folder, measure=measure))
    console.say(result.notices)
    if as_json:
        console.print_json(probe_json(result))
    else:
        print_probe(result)
