"""`hotsplit evaluate`: how good a plan is on traffic that it was not made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.evaluating import EvaluateTask, evaluate_plan, evaluation_json, print_evaluation
from hotsplit.cli.options import config_from, json_option, setting_options
from hotsplit.errors import PlanError
from hotsplit.notices import enforce


@click.command("evaluate")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--counts",
    "--test",
    "tests",
    multiple=True,
    required=True,
    metavar="TEST",
    help="Histogram (FILE or FILE#SET) or trace of traffic that the plan was not made from. Repeatable; both names mean the same.",
)
@click.argument("more_tests", nargs=-1, metavar="[TEST]...")
@click.option("--train", metavar="FILE", help="The histogram that the plan was made from: gives in-sample and drift.")
@click.option("--per-layer", is_flag=True, help="Print every layer's hit rates, not only the worst one's.")
@setting_options("strict")
@json_option
def command(
    tests: tuple[str, ...], more_tests: tuple[str, ...], per_layer: bool, as_json: bool, **options: Any
) -> None:
    """Score PLAN on every TEST: held-out, blind choice, oracles and layer order, layer by layer, with a verdict.

    Several tests may follow one --counts: --counts a.json b.json.
    """
    config = config_from(options)
    result = evaluate_plan(EvaluateTask(tests=(*tests, *more_tests), **options))
    console.say(result.notices)
    enforce(result.notices, strict=config.strict, error=PlanError)
    if as_json:
        console.print_json(evaluation_json(result))
    else:
        print_evaluation(result, per_layer=per_layer)
