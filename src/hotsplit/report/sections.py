"""The parts of the page that are text: headline, summary, tables, settings. Figures are empty frames that page.js fills.

Stands between report and page. Whatever a figure shows stands in a table beside it as well, so that the page says all it
has to say without a script, to a screen reader and in a text search.
"""

from __future__ import annotations

from hotsplit.report.blocks import each_plan, paragraph, plan_table, prose, radios, section, where
from hotsplit.report.content import PlanPart, Report
from hotsplit.report.markup import Html, element, escape, joined, table
from hotsplit.report.sentences import headline, percent, summary, verdict
from hotsplit.units import gib


def header(report: Report) -> Html:
    """Model, the one sentence, and the verdict.

    Args:
        report: What the page is about.
    """
    identity = report.histogram.identity
    top = f", top-{identity.top_k}" if identity.top_k else ""
    shape = f"{len(report.histogram.layers)} MoE layers \u00d7 {identity.num_experts} experts{top}"
    one = report.plans[0]
    title = headline(one) if len(report.plans) == 1 else f"{len(report.plans)} plans for {report.model_name}"
    return joined(
        [
            Html("<header>"),
            element("p", escape(f"hotsplit report: {report.model_name}, {shape}"), class_="eyebrow"),
            element("h1", prose(title)),
            _verdict(*verdict(one)) if len(report.plans) == 1 else Html(""),
            Html("</header>"),
        ]
    )


def _verdict(name: str, text: str) -> Html:
    return element("p", escape(text[:1].upper() + text[1:]), class_=f"verdict {name}")


def in_short(report: Report) -> Html:
    """The numbers that matter and what they mean; several plans also side by side, with a choice of one.

    Args:
        report: What the page is about.
    """
    several = len(report.plans) > 1
    choice = [_comparison(report), radios("plan", "Show", [part.name for part in report.plans], class_="plans")]
    return section(
        "short", "In short", *(choice if several else []), each_plan(report, lambda part: _judged(part, several))
    )


def _judged(part: PlanPart, several: bool) -> Html:  # noqa: FBT001 - called in one place, above
    lead = []
    if several:
        lead = [element("h3", escape(part.name)), element("p", prose(headline(part)), class_="headline")]
        lead.append(_verdict(*verdict(part)))
    lines = [f"<div><dt>{escape(each.topic)}</dt><dd>{prose(each.text)}</dd></div>" for each in summary(part)]
    return joined([*lead, _figures(part), Html('<dl class="sentences">\n' + "\n".join(lines) + "\n</dl>")])


def _figures(part: PlanPart) -> Html:
    """The five numbers that matter."""
    score = part.score
    own = "its own traffic" if part.has_own_counts else "the traffic given, not its own,"
    shown = [
        ("of the experts\u2019 bytes are in fast memory", part.evaluation.null, "null"),
        (f"of {own} served there", part.evaluation.in_sample, "own"),
        ("of unseen traffic served there", part.evaluation.held_out, "unseen"),
        ("by a blind choice of the same bytes", part.evaluation.null, "blind"),
        ("by the best choice in hindsight", score.oracle_free, "oracle"),
    ]
    lead = "unseen" if part.has_test else "own"
    rows = [
        f"""<div{' class="lead"' if name == lead else ""}><dt>{prose(text)}</dt>"""
        f"""<dd data-figure="{name}">{prose("not known" if rate is None else percent(rate))}</dd></div>"""
        for text, rate, name in shown
    ]
    return Html('<dl class="figures">\n' + "\n".join(rows) + "\n</dl>")


def _comparison(report: Report) -> Html:
    rows = [
        [
            part.name,
            gib(part.hot_bytes) if part.has_bytes else "-",
            percent(part.evaluation.null),
            percent(part.evaluation.in_sample),
            percent(part.evaluation.held_out),
            percent(part.score.oracle_free),
            f"{percent(min(part.score.per_layer))} ({part.score.worst_layer})",
            verdict(part)[1],
        ]
        for part in report.plans
    ]
    columns = [
        "plan",
        "hot bytes",
        "of all bytes",
        "own traffic",
        "unseen traffic",
        "best in hindsight",
        "worst layer",
        "verdict",
    ]
    return table("All plans on the same traffic", columns=columns, rows=rows)


def experts(report: Report) -> Html:
    """The heat map's frame, and its table.

    Args:
        report: What the page is about.
    """
    traffics = [traffic.title for traffic in report.traffics]
    controls = [radios("order", "Order", ["by use", "by expert id"], values=["use", "id"])]
    controls += [radios("traffic", "Traffic", traffics)] if len(traffics) > 1 else []
    lead = (
        "Each row is a layer, each cell one of its experts: the stronger its colour, the more the traffic uses it. Inside the "
        "orange line an expert is in fast memory; outside, it is read from slow memory, and strong colour there costs time."
    )
    about = (
        "Heat map of every expert in every layer. Arrow keys move from cell to cell, with Shift ten at a time; Home and End go "
        "to the ends of a row, Escape leaves. The same numbers per layer are in the table below."
    )
    bars = "bars: how much of the layer\u2019s traffic is served hot; upright line: a blind choice; full colour: the weakest layer"
    frame = f"""<figure>
<div class="controls">{"".join(controls)}</div>
<div class="map">
<div class="head">layer</div><div class="head" id="experts-head"></div><div class="head">served</div>
<canvas id="layers"></canvas>
<div class="cells" tabindex="0" role="application" aria-roledescription="heat map" aria-label="{escape(about)}">
<div class="field"><canvas id="cells"></canvas><canvas id="mark" class="mark"></canvas></div></div>
<canvas id="bars"></canvas>
</div>
<figcaption class="keys">
<div class="ramp"><div class="bar"></div><div class="ticks" id="ticks"></div>use, as a multiple of an even share</div>
<div class="box">hot: in fast memory</div>
<div>{escape(bars)}</div>
</figcaption>
<noscript><p class="note">The figures need JavaScript, which this page brings along; the tables do not.</p></noscript>
</figure>"""
    served = [f"served, {traffic.title}" for traffic in report.traffics]
    columns = ["layer", "where", "hot experts", "hot bytes", *served, "most used expert"]
    tables = plan_table(report, "Every layer as a table", columns=columns, make=lambda part: _layers(report, part))
    return section("experts", "Which experts are in fast memory", paragraph(lead), Html(frame), tables)


def _layers(report: Report, part: PlanPart) -> list[list[str]]:
    own_LE, rows = report.traffics[0].counts, []
    for n, layer in enumerate(part.plan.layers):
        total, top = float(own_LE[n].sum()), int(own_LE[n].argmax())
        share = percent(float(own_LE[n, top]) / total) if total else "-"
        size = gib(len(part.plan.hot[n]) * part.plan.row_bytes[n]) if part.has_bytes else "-"
        rates = [percent(score.per_layer[n]) for score in part.scores]
        rows.append([str(layer), where(part.plan, n), str(len(part.plan.hot[n])), size, *rates, f"{top} ({share})"])
    return rows
