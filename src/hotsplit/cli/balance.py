"""`hotsplit balance`: play sample traffic through a server and learn from it where its experts should lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.behind import BeforeAndBehind
from hotsplit.cli.options import Integer, Seconds, config_from, json_option, setting_options
from hotsplit.errors import EngineError


def _parse_headers(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Headers as "Name: value"."""
    headers = {}
    for text in values:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or not f"{name}{value}".isascii():
            raise click.BadParameter("wanted 'Name: value'")  # its value may be a secret: it is not repeated
        headers[name.strip()] = value.strip()
    return headers


@click.command("balance", cls=BeforeAndBehind)
@click.argument("model", required=False)
@click.option("--recipe", help="Name of a recipe, or a .toml file: its model, flags and layout; yours beat them.")
@click.option(
    "--data",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help='Sample traffic, .jsonl: chat "messages", or a "prompt" or "text", in every line. Repeatable.',
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--url", help="Use a server that runs on this host with hotsplit in it, instead of starting one.")
@click.option("--max-tokens", type=Integer(min=1), default=256, show_default=True, help="Generated per request.")
@click.option("--max-requests", type=Integer(min=2), help="Play the first so many; all without it.")
@click.option("--concurrency", type=Integer(1, 1024), default=32, show_default=True, help="Requests at the same time.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(min=1), default=600, show_default=True, help="Of one request, in s."
)
@click.option(
    "--header", "headers", multiple=True, callback=_parse_headers, help="'Name: value' with every request. Repeatable."
)
@setting_options(
    "hot_gib",
    "dynamic",
    "objective",
    "strict",
    "vram_reserve_gib",
    "numa_policy",
    "bank_dir",
    state_dir="With --url: where that server keeps its state. A server that is started keeps it in the output folder.",
)
@json_option
def command(
    model: str | None, recipe: str | None, url: str | None, flags: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Play sample traffic through a server of MODEL; write its histogram, a plan, and what the plan is worth.

    Starts vLLM's server with an even placement, and ends it; what stands behind -- is vLLM's own. A second start with the
    same arguments goes on where the first one stopped.
    """
    from hotsplit.cli import balancing
    from hotsplit.cli.balance_view import balanced_json, print_balanced
    from hotsplit.cli.recipes_serving import ServeWish

    wish = ServeWish(model=model, recipe=recipe, flags=flags, options=options)
    serve = balancing.serve_of(wish, url=url, environ=dict(os.environ))
    config = config_from(options) if serve is None else serve.config
    task = balancing.BalanceTask(
        model=model, recipe=recipe, url=url, flags=flags, serve=serve, config=config, **options
    )
    try:
        result = balancing.balance(task)
    except EngineError as error:
        for line in getattr(error, "tail", ()):
            console.note(f"  {line}")
        raise
    console.say(result.notices)
    if as_json:
        console.print_json(balanced_json(result, output=task.output))
    else:
        print_balanced(result, output=task.output)
