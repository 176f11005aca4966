"""`hotsplit top`: what a running server's hot and cold experts do, from its /metrics alone."""

from __future__ import annotations

from functools import partial

import click

from hotsplit.cli.options import Integer, Seconds, json_option


@click.command("top")
@click.argument("url")
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds from one reading to the next; with --once, what a rate is taken over at least.",
)
@click.option("--once", is_flag=True, help="Print one reading with its rates, and end; 1 if there is none.")
@click.option("--history", type=Integer(1, 1000), default=60, show_default=True, help="Readings that the bars show.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Sent with every request, as in 'Authorization: Bearer KEY'; may be given again.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds that an answer may take.",
)
@json_option
def command(
    url: str,
    *,
    interval_s: float,
    once: bool,
    history: int,
    headers: tuple[str, ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Watch the server at URL (its address, as in http://HOST:8000): hit rate, cold bytes, swaps, tokens per second.

    Reads the server's /metrics and nothing else, so it runs on any machine that reaches it. On a terminal the numbers
    are a screen that Ctrl-C ends; elsewhere every reading is one line, with --json an object.
    """
    from hotsplit.cli import scrape, watch_loop, watching

    target = scrape.Target(
        url=scrape.metrics_url(url), headers=dict(map(scrape.header_of, headers)), timeout_s=timeout_s
    )
    ask = partial(scrape.scrape, target)
    if once:
        watch_loop.show_once(watching.one_frame(ask, url=target.url, least_s=interval_s), as_json=as_json)
    else:
        asked = watching.frames(ask, url=target.url, every_s=interval_s, history=history)
        watch_loop.show_all(asked, as_json=as_json)
