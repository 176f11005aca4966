"""`hotsplit plan`: choose the hot experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import Integer, config_from, force_option, json_option, setting_options
from hotsplit.cli.views import plan_json, print_plan
from hotsplit.cli.work import PlanTask, make_plan_for


@click.command("plan")
@click.argument("model", required=False)
@setting_options("hot_gib", "dynamic", "counts", "objective", "strict", "vram_reserve_gib")
@click.option("--hot-fraction", type=float, help="Without a model: share of all experts that is hot, 0 to 1.")
@click.option("--test", help="Histogram of other traffic; the plan is scored on it, never made from it.")
@click.option("--tp", type=Integer(min=1), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--pp", type=Integer(min=1), default=1, show_default=True, help="Pipeline-parallel size.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan to this file.")
@force_option
@json_option
def command(output: Path | None, as_json: bool, **options: Any) -> None:
    """Choose the hot experts of MODEL (a folder or a hub id) from a routing histogram, under a budget.

    Without MODEL, --counts with --hot-fraction plans experts of equal size.
    """
    config = config_from(options)
    result = make_plan_for(PlanTask(config=config, output=output, **options))
    console.say(result.notices)
    if as_json:
        console.print_json(plan_json(result))
    else:
        print_plan(result)
    if output:
        console.note(f"plan written to {output}")
