"""`hotsplit demo`: the whole job on the bundled model."""

from __future__ import annotations

import click

from hotsplit.cli import console
from hotsplit.cli.options import json_option
from hotsplit.errors import EngineError


@click.command("demo")
@json_option
def command(as_json: bool) -> None:
    """Profile, plan and run a small trained model that ships with hotsplit; every number is measured as it runs."""
    from hotsplit.cli.demonstration import Demonstration

    console.out.quiet = as_json
    results = Demonstration().run()
    console.out.quiet = False
    if as_json:
        console.print_json(results)
    if not results["static"]["identical"]:
        raise EngineError("the demo", got="static mode whose tokens differ from stock", do="report this bug")
