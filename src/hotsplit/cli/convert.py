"""`hotsplit convert`: a histogram in the form of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.converting import TARGET_NAMES, ConvertTask, convert_file
from hotsplit.cli.histograms import experts_option, layers_option, phase_option
from hotsplit.cli.options import config_from, json_option, setting_options
from hotsplit.cli.views import histogram_json, print_histogram


@click.command("convert")
@click.argument("file")
@click.option("--to", type=click.Choice(TARGET_NAMES), required=True, help="Form to write.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write it here.")
@layers_option
@experts_option
@phase_option
@setting_options("strict")
@json_option
def command(file: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write the histogram FILE (or FILE#SET) in another form; what that form cannot hold is said aloud.

    FILE may have any form that is read: hotsplit, train, live, flat, layers, counts, pairs, sets, csv, npy, npz, pt, or
    a routing trace, which is counted.
    """
    config = config_from(options)
    histogram, notices = convert_file(ConvertTask(file=file, output=output, strict=config.strict, **options))
    console.say(notices)
    if as_json:
        console.print_json(histogram_json(histogram))
    else:
        print_histogram(histogram, name=file)
    console.note(f"histogram written to {output}")
