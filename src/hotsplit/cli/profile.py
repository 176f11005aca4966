"""`hotsplit profile`: play sample traffic through a model and write its routing histogram."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.device_option import device_option
from hotsplit.cli.options import SEED, config_from, json_option, setting_options
from hotsplit.cli.views import histogram_json, print_histogram


@click.command("profile")
@click.argument("model")
@click.option(
    "--data",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="A text file (a domain, cut into prompts) or .jsonl with text or chat messages per line. Repeatable.",
)
@click.argument("more_files", nargs=-1, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the histogram here.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write every token's experts to this .npz as well.")
@click.option("--prompt-tokens", type=int, default=128, show_default=True, help="Longest prompt, in tokens.")
@click.option("--decode-tokens", type=int, default=64, show_default=True, help="Tokens decoded per prompt.")
@click.option("--max-prompts", type=int, default=32, show_default=True, help="Prompts per file, spread over it.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Prompts computed at once.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="Of sampling; 0 decodes greedily.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of sampling.")
@setting_options("hot_gib", "vram_reserve_gib", "counts", "plan", "kernel", "numa_policy")
@device_option
@json_option
def command(  # noqa: PLR0917 - click calls by name
    model: str,
    files: tuple[Path, ...],
    more_files: tuple[Path, ...],
    output: Path,
    trace: Path | None,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Count what sample traffic asks of every expert of MODEL: decode and prefill apart.

    Several files may follow one --data: --data a.txt b.txt c.jsonl.
    """
    from hotsplit.cli.profiling import ProfileTask, profile

    config = config_from(options)
    task = ProfileTask(
        model=model,
        files=(*files, *more_files),
        output=output,
        trace=trace,
        config=config,
        device=device,
        options=options,
    )
    with console.logging_to_stderr():
        histogram = profile(task)
    if as_json:
        console.print_json(histogram_json(histogram))
    else:
        print_histogram(histogram, name=model)
    console.note(f"histogram written to {output}" + (f", trace to {trace}" if trace else ""))
