"""`hotsplit rerank`: merge live counts into a reference histogram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import config_from, json_option, setting_options
from hotsplit.cli.places import histogram_files, require_places
from hotsplit.cli.views import histogram_json, print_histogram
from hotsplit.errors import HistogramError
from hotsplit.notices import enforce
from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import save_histogram
from hotsplit.plan.rerank import MIN_TOKENS, rerank


@click.command("rerank")
@click.argument("live")
@click.argument("reference")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the merged histogram here.")
@click.option("--live-weight", type=float, default=1.0, show_default=True, help="Weight of live; the reference has 1.")
@click.option(
    "--min-tokens",
    type=click.IntRange(min=0),
    default=MIN_TOKENS,
    show_default=True,
    help="Decode tokens per layer that the live sample must have; 0 asks for nothing.",
)
@setting_options("strict")
@json_option
def command(
    live: str, reference: str, output: Path, live_weight: float, min_tokens: int, as_json: bool, **options: Any
) -> None:
    """Merge the counts of LIVE into those of REFERENCE, normalised per layer."""
    config = config_from(options)
    require_places({"--output": output}, inputs=histogram_files(live, reference))
    live_counts, said_live = load_histogram(live)
    reference_counts, said_reference = load_histogram(reference)
    merged, said = rerank(reference_counts, live_counts, live_weight=live_weight, min_tokens=min_tokens)
    notices = [*said_live, *said_reference, *said]
    enforce(notices, strict=config.strict, error=HistogramError)
    console.say(notices)
    save_histogram(merged, output)
    if as_json:
        console.print_json(histogram_json(merged))
    else:
        print_histogram(merged, name=str(output))
    console.note(f"merged histogram written to {output}")
