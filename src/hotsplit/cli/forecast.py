"""`hotsplit forecast`: seconds per step and tokens per second of a plan on a machine, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.forecast_view import forecast_json, print_forecast
from hotsplit.cli.forecasting import ForecastTask, forecast_for
from hotsplit.cli.options import config_from, force_option, json_option, setting_options

_FILE = click.Path(path_type=Path)


@click.command("forecast")
@click.argument("plan", type=_FILE)
@setting_options("strict", counts="Histogram of the traffic to forecast for; needed.")
@click.option("--rates", type=_FILE, help="Rates file of the machine: what its memories and links give.")
@click.option("--link", type=float, help="In-place reads of host memory by one GPU, GB/s; beats the rates file.")
@click.option("--hbm", type=float, help="A GPU's own memory, GB/s; beats the rates file.")
@click.option("--host-memory", type=float, help="Host memory, all GPUs together, GB/s; beats the rates file.")
@click.option("--trace", type=_FILE, help="Trace (npz) that tells how tokens in a row repeat each other's experts.")
@click.option("--row-mib", type=float, help="One expert on one rank, MiB, for a plan that was made without a model.")
@click.option("--dense-gib", type=float, help="All other weights that a step reads on one rank, GiB.")
@click.option("--other-ms", type=float, help="Everything else in a step: attention, launches, sampling; ms.")
@click.option("--cold-layer-us", type=float, help="What any cold work at all costs a layer beside its bytes; us.")
@click.option("--kv-bytes-per-token", type=float, help="KV cache of one token on one rank, bytes.")
@click.option(
    "--accepted", type=float, help="Tokens that a request gains in a speculative step, the step's own one too."
)
@click.option("--batch", metavar="LIST", help="Requests side by side, as 1,8,32,128 (the default).")
@click.option("--window", metavar="LIST", help="Tokens that a speculative step checks, as 2,4,8 (the default).")
@click.option(
    "--chunk", metavar="LIST", help="Prompt tokens of a prefill step, as 512,1024,2048,4096,8192 (the default)."
)
@click.option("--sweep", metavar="LIST", help="Hot budgets per rank to forecast too, GiB, as 40,60,80; or auto.")
@force_option
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Forecast seconds per step and tokens per second of PLAN, between two bounds, and what binds.

    Needs the counts of the traffic, and the rates of fast memory and of in-place reads: from --rates, or as --hbm and
    --link.
    """
    config = config_from(options)
    result = forecast_for(ForecastTask(config=config, **options))
    console.say(result.notices)
    if as_json:
        console.print_json(forecast_json(result))
    else:
        print_forecast(result)
