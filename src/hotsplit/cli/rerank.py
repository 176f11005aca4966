"""`hotsplit rerank`: merge live counts into a reference histogram."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import Integer, config_from, json_option, setting_options
from hotsplit.cli.reranking import RerankTask, rerank_files
from hotsplit.cli.views import histogram_json, print_histogram
from hotsplit.plan.rerank import MIN_TOKENS


@click.command("rerank")
@click.argument("files", nargs=-1, metavar="[LIVE] REFERENCE")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the merged histogram here.")
@click.option(
    "--learned",
    "is_learned",
    is_flag=True,
    help="Take what servers of REFERENCE's model have learned instead of LIVE; --state-dir implies it.",
)
@click.option("--live-weight", type=float, default=1.0, show_default=True, help="Weight of live; the reference has 1.")
@click.option(
    "--min-tokens",
    type=Integer(min=0),
    default=MIN_TOKENS,
    show_default=True,
    help="Decode tokens per layer that the live sample must have; 0 asks for nothing.",
)
@setting_options("state_dir", "strict")
@json_option
def command(output: Path, is_learned: bool, as_json: bool, **options: Any) -> None:
    """Merge the counts of LIVE, or with --learned what servers have learned, into REFERENCE, normalised per layer.

    It takes effect at the next start that is given the result; a server that runs is left alone.
    """
    config = config_from(options)
    is_learned = is_learned or config.origin("state_dir") == "option"
    result = rerank_files(RerankTask(output=output, is_learned=is_learned, config=config, **options))
    console.say(result.notices)
    if as_json:
        console.print_json(histogram_json(result.histogram))
    else:
        print_histogram(result.histogram, name=str(output))
    for path in result.learned:
        console.note(f"learned counts read from {path}")
    console.note(f"merged histogram written to {output}")
    start = f"hotsplit serve ... --counts {shlex.quote(str(output))}"
    console.note(f"nothing was restarted; it takes effect at the next start: {start}")
    if is_learned:
        text = "that start merges what was learned in once more; --learned ignore leaves it out, and learns nothing"
        console.note(text)
