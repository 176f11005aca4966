"""`hotsplit simulate`: replay a recorded routing trace against placement policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import Integer, config_from, force_option, json_option, setting_options
from hotsplit.cli.simulate_inputs import SimulateTask
from hotsplit.cli.simulate_view import print_simulation, simulation_json
from hotsplit.cli.simulating import simulate
from hotsplit.files import canonical_json, write_atomic
from hotsplit.plan.replay import KEPT
from hotsplit.plan.transit import PLACEMENTS

_FILE = click.Path(path_type=Path)
_COUNT = Integer(min=1)


@click.command("simulate")
@click.argument("trace", type=_FILE)
@setting_options(
    plan="Plan to start from; or name --counts, or --plan-domain.",
    counts="Histogram to make the plan from, at --hot-gib or --hot-fraction.",
)
@click.option("--plan-domain", help="Plan from this domain's own decode counts in TRACE.")
@click.option(
    "--domain", "domains", multiple=True, help="Play this domain of TRACE; repeat it to play several in turn."
)
@setting_options(hot_gib="Hot budget of the plan that is made; or --hot-fraction.")
@click.option("--hot-fraction", type=float, help="Share of all experts that is hot, 0 to 1.")
@click.option("--even", is_flag=True, help="The same number of hot experts in every layer, with --hot-fraction.")
@click.option("--row-mib", type=float, help="One expert on one rank, MiB, where neither plan nor trace says.")
@click.option("--policy", default="static,dynamic,lru,oracle", show_default=True, help="Which to replay.")
@click.option("--steps", type=_COUNT, help="Play so many steps (of every --domain that is named).")
@click.option("--tokens-per-step", type=_COUNT, help="Cut into steps of so many tokens, whatever the trace's own are.")
@click.option("--phase", type=click.Choice(KEPT), default="decode", show_default=True, help="Which tokens to play.")
@click.option("--window", type=_COUNT, help="Steps of one window of the result (default: a tenth of all).")
@click.option("--placement", type=click.Choice(PLACEMENTS), default="inclusive", show_default=True, help="Of swaps.")
@click.option(
    "--no-prior", is_flag=True, help="Let dynamic policies start without the counts that the plan is made of."
)
@setting_options("dyn_schedule", "dyn_steps", "dyn_max_swaps", "dyn_margin", "dyn_half_life")
@click.option("--sweep", multiple=True, metavar="NAME=V,V", help="Replay for each value: dyn-steps=20,100. Repeatable.")
@click.option("--rates", type=_FILE, help="Rates file of the machine: seconds of reading experts are forecast too.")
@click.option("-o", "--output", type=_FILE, help="Write the result to this file, as JSON.")
@force_option
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Replay TRACE (npz, from hotsplit profile --trace): hit rates, bytes read cold and bytes moved, over time.

    Placement: "inclusive" as in the transformers engine, "exclusive" as in vLLM, "instant" without the two or three
    steps that a swap takes in either. dynamic follows the --dyn- settings; lru and oracle are for comparison.
    """
    config = config_from(options)
    result = simulate(SimulateTask(config=config, **options))
    if output := options["output"]:
        write_atomic(output, canonical_json(simulation_json(result)))
    console.say(result.notices)
    if as_json:
        console.print_json(simulation_json(result))
    else:
        print_simulation(result)
    if output:
        console.note(f"simulation written to {output}")
