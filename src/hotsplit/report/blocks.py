"""What every part of the page is put together from: sections, one block per plan, choices, prose.

Stands between `markup`, which knows HTML, and the parts of the page, which know plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hotsplit.plan.planfile import Plan
from hotsplit.report.content import PlanPart, Report
from hotsplit.report.markup import Html, details, element, escape, joined, table


def section(name: str, title: str, *parts: Html) -> Html:
    """A part of the page.

    Args:
        name: Its id.
        title: Its heading.
        *parts: What is in it.
    """
    return element("section", joined([element("h2", escape(title)), *parts]), id=name)


def each_plan(report: Report, make: Callable[[PlanPart], Html]) -> Html:
    """One block per plan; the page shows one of them at a time.

    Args:
        report: With the plans.
        make: What to say about one.
    """
    return joined(element("div", make(part), data_plan=str(number)) for number, part in enumerate(report.plans))


def plan_table(
    report: Report, title: str, *, columns: Sequence[str], make: Callable[[PlanPart], Iterable[Sequence[str]]]
) -> Html:
    """A table per plan that opens when it is asked for; its title names the plan where there are several.

    Args:
        report: With the plans.
        title: What it shows.
        columns: Headings.
        make: The rows of one plan.
    """

    def block(part: PlanPart) -> Html:
        named = f"{title}, {part.name}" if len(report.plans) > 1 else title
        return details(named, table(named, columns=columns, rows=make(part)))

    return each_plan(report, block)


def prose(text: str) -> Html:
    """Escaped, and no number parts from its unit at the end of a line.

    Args:
        text: Sentences.
    """
    shown = str(escape(text))
    for unit in ("%", "GiB", "MiB", "points"):
        shown = shown.replace(f" {unit}", f"&nbsp;{unit}")
    return Html(shown)


def paragraph(text: str) -> Html:
    """Prose as a paragraph.

    Args:
        text: Sentences.
    """
    return element("p", prose(text))


def radios(
    name: str, legend: str, choices: Sequence[str], *, values: Sequence[str] = (), class_: str = "choice"
) -> Html:
    """A choice of one: native radio buttons, which every keyboard and screen reader knows.

    Args:
        name: Of the group.
        legend: What is chosen.
        choices: What people read.
        values: What the script reads; numbers from 0 where there are none.
        class_: Of the group.
    """
    labels = [
        f'<label><input type="radio" name="{escape(name)}" value="{escape(value)}"{" checked" if n == 0 else ""}>'
        f"{escape(choice)}</label>"
        for n, (value, choice) in enumerate(zip(values or map(str, range(len(choices))), choices, strict=True))
    ]
    return element("fieldset", Html(f"<legend>{escape(legend)}</legend>{''.join(labels)}"), class_=class_)


def chart(name: str, title: str, **attributes: str) -> Html:
    """The frame of a line chart, which page.js fills; its key shows the values.

    Args:
        name: Its id.
        title: For screen readers, and above it.
        **attributes: More of the frame.
    """
    about = f"{title}. The arrow keys move along it, Escape leaves; the numbers are in a table below."
    frame = element(
        "div", Html(""), id=name, class_="chart", tabindex="0", role="group", aria_label=about, **attributes
    )
    return element(
        "figure", joined([element("h3", escape(title)), frame, Html(f'<ul class="key" id="{escape(name)}-key"></ul>')])
    )


def where(plan: Plan, layer_id: int) -> str:
    """The pipeline stage and the ranks that hold a layer: "stage 1, ranks 4 to 7".

    Args:
        plan: The plan.
        layer_id: Row of the layer.
    """
    number, left = 0, layer_id
    while left >= len(plan.stages[number].layers):
        left -= len(plan.stages[number].layers)
        number += 1
    first, tp = number * plan.identity.tp, plan.identity.tp
    ranks = f"rank {first}" if tp == 1 else f"ranks {first} to {first + tp - 1}"
    return ranks if len(plan.stages) == 1 else f"stage {number}, {ranks}"
