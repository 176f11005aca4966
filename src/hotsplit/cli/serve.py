"""`hotsplit serve`: vLLM's server with hot and cold experts, all that can be checked checked first."""

from __future__ import annotations

import os
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.behind import BeforeAndBehind
from hotsplit.cli.options import json_option, setting_options


@click.command("serve", cls=BeforeAndBehind)
@click.argument("model", required=False)
@click.option(
    "--recipe", help="Name of a recipe, or a .toml file: its model, flags, layout and counts; yours beat them."
)
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
    "vram_reserve_gib",
    "numa_policy",
    "bank_dir",
    "enable",
)
@click.option("--check", is_flag=True, help="Check and print everything, and start nothing.")
@json_option
def command(
    model: str | None, recipe: str | None, flags: tuple[str, ...], check: bool, as_json: bool, **options: Any
) -> None:
    """Serve MODEL (a folder or a hub id) with vLLM, its experts hot and cold by plan.

    With --recipe MODEL may be left out: it is then the recipe's, which vLLM downloads.

    Checks the settings, the model's folder and the files, shows what would be hot, and then becomes vLLM's server: its
    signals and its exit code are vLLM's. What stands behind -- is vLLM's own, and goes to it unchanged.
    """
    from hotsplit.cli import recipes_serving, serving, vllm_process

    wish = recipes_serving.ServeWish(model=model, recipe=recipe, flags=flags, options=options)
    task = recipes_serving.serve_task(wish, environ=dict(os.environ))
    start = serving.prepare(task, find_vllm=vllm_process.find_vllm)
    console.say(start.notices)
    if as_json:
        console.print_json(serving.start_json(start))
    else:
        serving.print_start(start)
    if not check:
        serving.launch(start, execute=os.execve)
