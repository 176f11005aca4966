"""`hotsplit run`: generate text with hot and cold experts."""

from __future__ import annotations

from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.device_option import device_option
from hotsplit.cli.options import SEED, Integer, Number, config_from, force_option, json_option, setting_options


@click.command("run")
@click.argument("model")
@click.option("--prompt", required=True, help="What to continue.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--max-new-tokens", type=Integer(min=1), default=64, show_default=True, help="Tokens to generate.")
@click.option("--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 decodes greedily.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of sampling.")
@setting_options(
    "hot_gib",
    "dynamic",
    "dyn_steps",
    "dyn_max_swaps",
    "dyn_margin",
    "dyn_half_life",
    "dyn_schedule",
    "counts",
    "plan",
    "learned",
    "state_dir",
    "objective",
    "strict",
    "kernel",
    "vram_reserve_gib",
    "numa_policy",
    "enable",
)
@device_option
@force_option
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Generate text with MODEL (a folder or a hub id), its experts hot and cold by plan.

    The text goes to stdout, on a terminal word by word; numbers and log lines go to stderr.
    """
    from hotsplit.cli.running import RunTask, run
    from hotsplit.cli.views import print_run

    config = config_from(options)
    is_streamed = console.out.is_terminal and not as_json
    with console.logging_to_stderr():
        result = run(RunTask(model=model, config=config, **options), is_streamed=is_streamed)
    if as_json:
        console.print_json(result)
    else:
        print_run(result, is_text_shown=is_streamed)
