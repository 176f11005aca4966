"""`hotsplit report`: a page that shows what plans do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import config_from, json_option, setting_options
from hotsplit.cli.reporting import ReportTask, make_report, plain_summary, report_json

_TOPIC_WIDTH = 21


@click.command("report")
@click.argument("plans", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PLAN...")
@setting_options("strict", counts="Histogram that the plans were made from; needed.")
@click.option("--test", help="Histogram of other traffic; the plans are scored on it.")
@click.option("--rates", type=click.Path(path_type=Path), help="Measured rates of the machine (JSON): adds a forecast.")
@click.option(
    "--run",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A run's folder (STATE_DIR/runs/...) or its log with update lines; may be given twice for both.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the page (HTML) to this file."
)
@json_option
def command(plans: tuple[Path, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Write one page that shows what each PLAN does and how good it is; it opens in any browser, offline.

    All plans are of one model, and --counts names the histogram that they were made from.
    """
    config = config_from(options)
    result = make_report(ReportTask(config=config, plans=plans, output=output, **options))
    console.say(result.notices)
    if as_json:
        console.print_json(report_json(result, output=output))
    else:
        for title, sentences in plain_summary(result.report.plans):
            console.prose(title, style="bold")
            for topic, text in sentences:
                console.prose(text, indent=_TOPIC_WIDTH, label=topic)
    console.note(f"page written to {output}")
