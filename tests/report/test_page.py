from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hotsplit.errors import PlanMismatchError
from hotsplit.plan.evaluate import evaluate
from hotsplit.plan.histogram import PhaseCounts
from hotsplit.report.live import Run
from hotsplit.report.markup import embedded, escape, printable
from report.reports import HOSTILE, RATES, data_of, line_of, page_of, plan_of, report_of, skewed, snapshot_of, weighed

OWN, UNSEEN = skewed(), skewed(seed=1)
PLAN = plan_of(OWN)


class Tags(HTMLParser):
    """Every tag with its attributes, and whether all of them closed."""

    VOID = ("meta", "input", "img", "br", "hr", "link")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()


def tags_of(page):
    parsed = Tags(page.decode("ascii"))
    assert [] == parsed.open
    return parsed.tags


def run_of(plan):
    snapshot = snapshot_of(plan, counts=OWN.phases["decode"].counts)
    return Run(lines={0: tuple(line_of(update) for update in range(1, 6))}, snapshots={0: snapshot})


@pytest.fixture(scope="module")
def full_page():
    """Everything that a page can have."""
    plans = [weighed(plan_of(OWN, fraction=fraction), tp=2, pp=2) for fraction in (0.25, 0.5)]
    return page_of(*plans, histogram=OWN, test=UNSEEN, rates=RATES, run=run_of(plans[0]))


def test_every_element_closes(full_page):
    assert tags_of(full_page)


def test_the_page_asks_for_nothing(full_page):
    attributes = [set(attributes) for _, attributes in tags_of(full_page)]
    assert set() == set().union(*attributes) & {
        "src",
        "href",
        "srcset",
        "action",
        "data",
        "poster",
        "style",
        "onclick",
        "onload",
    }
    style = re.search(rb"<style>(.*?)</style>", full_page, flags=re.DOTALL)[1]
    assert [] == re.findall(rb"url\(|@import|http", style)


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(full_page):
    policy = next(a["content"] for _, a in tags_of(full_page) if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert "'none'" == rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action")
    for name, tag in (("style-src", b"style"), ("script-src", b"script")):
        text = re.search(rb"<" + tag + rb">(.*?)</" + tag + rb">", full_page, flags=re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert f"'sha256-{digest}'" == rules.pop(name)
    assert {} == rules


def test_the_same_input_is_the_same_bytes():
    first, second = (page_of(plan_of(skewed()), histogram=skewed(), test=skewed(seed=1)) for _ in range(2))
    assert first == second


def test_a_page_names_no_time(full_page):
    assert [] == re.findall(rb"20\d\d-\d\d-\d\d", full_page)


def test_hostile_names_stay_text():
    histogram = replace(OWN, name=HOSTILE, quantisation=HOSTILE)
    plans = [PLAN, plan_of(OWN, fraction=0.5)]
    page = page_of(*plans, histogram=histogram, names=[HOSTILE, HOSTILE + "2"])
    harmless = page_of(*plans, histogram=replace(OWN, name="a", quantisation="b"), names=["c", "d"])
    assert [tag for tag, _ in tags_of(harmless)] == [tag for tag, _ in tags_of(page)]
    assert [set(a) for _, a in tags_of(harmless)] == [set(a) for _, a in tags_of(page)]
    assert (
        HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e").replace("\udce9", "\\udce9")
        == data_of(page)["plans"][0]["name"]
    )


@pytest.mark.parametrize("text", [HOSTILE, "<!--<script>", "]]>", "&lt;", "a\x00b", "\ud800", "\U0001f600"])
def test_what_is_escaped_cannot_be_markup(text):
    assert set() == set(escape(text)) & set("<>\"'")
    assert set() == set(embedded({"a": text})) & set("<>&")
    assert escape(text).isascii()
    assert embedded(text).isascii()


def test_what_cannot_be_seen_is_shown():
    assert "a\\u0000b\\u202e\\u2028\\udce9 \u00e9" == printable("a\x00b\u202e\u2028\udce9 \u00e9")


def test_the_page_has_the_rates_of_the_evaluation():
    found, page = evaluate(PLAN, histogram=OWN, test=UNSEEN), page_of(PLAN, histogram=OWN, test=UNSEEN)
    plan = data_of(page)["plans"][0]
    assert (found.null, found.in_sample, found.held_out) == (plan["null"], plan["own"], plan["test"])
    assert [list(score.per_layer) for score in found.scores] == [score["per_layer"] for score in plan["scores"]]
    assert found.test.hit_rate == plan["scores"][plan["scored"]]["hit_rate"]
    for name, rate in (("own", found.in_sample), ("unseen", found.held_out), ("blind", found.null)):
        assert f'data-figure="{name}">{100 * rate:.1f}&nbsp;%<'.encode() in page


def test_the_page_has_the_plans_experts_and_all_counts():
    data = data_of(page_of(PLAN, histogram=OWN, test=UNSEEN))
    assert [list(hot) for hot in PLAN.hot] == data["plans"][0]["hot"]
    assert OWN.phases["decode"].counts.tolist() == data["traffic"][0]["rows"]
    assert UNSEEN.phases["decode"].counts.tolist() == data["traffic"][1]["rows"]


def test_scaled_counts_keep_the_digits_that_can_be_seen():
    counts = OWN.phases["decode"].counts / 3
    histogram = replace(OWN, normalised=True, phases={"decode": PhaseCounts(counts=counts)})
    rows = data_of(page_of(PLAN, histogram=histogram))["traffic"][0]["rows"]
    assert counts[0].tolist() == pytest.approx(rows[0], rel=1e-6)


def test_ranks_and_stages_of_a_layer_are_named():
    plan = weighed(plan_of(OWN), tp=2, pp=2)
    assert ["stage 0, ranks 0 to 1"] * 3 + ["stage 1, ranks 2 to 3"] * 3 == data_of(page_of(plan, histogram=OWN))[
        "plans"
    ][0]["ranks"]
    assert ["rank 0"] * 6 == data_of(page_of(PLAN, histogram=OWN))["plans"][0]["ranks"]


def test_every_plan_has_its_parts_and_a_choice(full_page):
    tags = tags_of(full_page)
    assert {"0", "1"} == {a["data-plan"] for _, a in tags if "data-plan" in a}
    assert ["0", "1"] == [a["value"] for tag, a in tags if tag == "input" and a["name"] == "plan"]
    assert [] == [a for tag, a in tags_of(page_of(PLAN, histogram=OWN)) if tag == "input" and a["name"] == "plan"]


def test_a_run_is_scored_on_what_it_routed():
    page = page_of(PLAN, histogram=OWN, run=run_of(PLAN))
    assert ["its own traffic, decode", "the run\u2019s traffic, decode"] == [
        each["title"].replace("'", "\u2019") for each in data_of(page)["traffic"]
    ]
    assert b"Where rank 0 stands" in page
    assert [[100, 0.5, 0.4, 0.7, 0.1]] == data_of(page)["run"][0]["lines"][:1]


def test_what_slots_kept_is_in_the_tables_where_there_are_slots():
    run = run_of(PLAN)
    assert b"kept in slots" not in page_of(PLAN, histogram=OWN, run=run)
    lines = tuple(line_of(update, kept=None if update == 1 else 0.375) for update in range(1, 4))
    snapshots = {0: replace(run.snapshots[0], kept_bytes=50)}
    page = page_of(PLAN, histogram=OWN, run=Run(lines={0: lines}, snapshots=snapshots))
    text = re.sub(r"\s*<[^>]+>\s*", " ", page.decode("ascii").split('<script type="application/json"')[0])
    words = " ".join(text.split())
    assert "byte hit rate kept in slots in reach" in words
    assert ["40.0 % - 70.0 %", *["40.0 % 37.5 % 70.0 %"] * 2] == re.findall(r"40\.0 % (?:-|[\d.]+ %) 70\.0 %", words)
    assert "kept in slots 12.5 % of the bytes" in words


def test_a_report_without_rates_or_run_has_no_such_parts():
    ids = {a.get("id") for _, a in tags_of(page_of(PLAN, histogram=OWN))}
    assert set() == ids & {"speed", "run", "hits", "forecast-0"}


def test_notices_of_forecast_and_run_are_handed_on():
    other = run_of(plan_of(OWN, fraction=0.5))
    _, notices = report_of(weighed(PLAN), histogram=OWN, rates=RATES, run=other)
    assert ["decode-counts-for-prefill", "run-of-another-plan"] == [notice.name for notice in notices]


def test_counts_of_another_model_are_refused():
    with pytest.raises(PlanMismatchError, match="num_experts"):
        page_of(PLAN, histogram=skewed(num_experts=8))


@pytest.mark.parametrize(("num_layers", "num_experts"), [(69, 384), (94, 512)])
def test_a_page_of_a_large_model_stays_small(num_layers, num_experts):
    own, unseen = (skewed(num_layers=num_layers, num_experts=num_experts, tokens=20_000, seed=seed) for seed in (0, 1))
    page = page_of(*(plan_of(own, fraction=fraction) for fraction in (0.1, 0.3, 0.5)), histogram=own, test=unseen)
    assert len(page) < 2_000_000


def test_what_ships_beside_the_code_is_ascii_and_small():
    page = page_of(PLAN, histogram=OWN)
    assert len(page) < 90_000
