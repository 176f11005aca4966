"""`hotsplit demo`: the whole job on the bundled model."""

from __future__ import annotations

import click

from hotsplit.cli import console
from hotsplit.cli.options import json_option
from hotsplit.errors import EngineError


@click.command("demo")
@click.option("--device", metavar="DEVICE", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@json_option
def command(device: str, as_json: bool) -> None:
    """Profile, plan and run a small trained model that ships with hotsplit; every number is measured as it runs.

    It runs on the CPU, where its tokens must equal stock's to the last one; on a GPU that is only looked at.
    """
    from hotsplit.cli.demonstration import Demonstration

    console.out.quiet = as_json
    results = Demonstration(device).run()
    console.out.quiet = False
    if as_json:
        console.print_json(results)
    if device == "cpu" and not results["static"]["identical"]:
        raise EngineError("the demo", got="static mode whose tokens differ from stock", do="report this bug")
