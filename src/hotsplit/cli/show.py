"""`hotsplit show`: what a file holds."""

from __future__ import annotations

import click

from hotsplit.cli import console
from hotsplit.cli.options import json_option
from hotsplit.cli.views import print_any, show_json
from hotsplit.cli.work import open_any


@click.command("show")
@click.argument("file")
@json_option
def command(file: str, as_json: bool) -> None:
    """Show a histogram (FILE or FILE#SET), a plan, a trace, or a run's snapshot (rank0.json)."""
    opened = open_any(file)
    console.say(opened.notices)
    if as_json:
        console.print_json(show_json(opened))
    else:
        print_any(opened)
