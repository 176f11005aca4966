"""`hotsplit merge`: several histograms of one model become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.converting import RULE_NAMES, MergeTask, merge_files
from hotsplit.cli.histograms import experts_option, layers_option, phase_option
from hotsplit.cli.options import config_from, json_option, setting_options
from hotsplit.cli.views import histogram_json, print_histogram


@click.command("merge")
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the merged histogram here.")
@click.option(
    "--rule",
    type=click.Choice(RULE_NAMES),
    default="shares",
    show_default=True,
    help="shares: samples of different traffic, normalised per layer and weighted. sum: pairs are added. ranks: files "
    "of one run's ranks; different experts are added, copies count once, anything else is an error.",
)
@click.option(
    "--weight",
    "weights",
    type=float,
    multiple=True,
    help="Of one file's shares, a number >= 0; repeat it for every file, in their order. Without it 1 each.",
)
@layers_option
@experts_option
@phase_option
@setting_options("strict")
@json_option
def command(files: tuple[str, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Merge two or more histograms FILE (or FILE#SET) of one model into one, in hotsplit's form."""
    config = config_from(options)
    merged, notices = merge_files(MergeTask(files=files, output=output, strict=config.strict, **options))
    console.say(notices)
    if as_json:
        console.print_json(histogram_json(merged))
    else:
        print_histogram(merged, name=str(output))
    console.note(f"merged histogram written to {output}")
