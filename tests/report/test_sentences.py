from __future__ import annotations

import pytest

from hotsplit.plan.verdict import WORDS
from hotsplit.report.sentences import UNTESTED, advice, headline, summary, verdict
from report.reports import plan_of, report_of, skewed, weighed


def part_of(histogram, *, test=None, fraction=0.25, weigh=False, pp=1):
    plan = plan_of(histogram, fraction=fraction)
    plan = weighed(plan, pp=pp) if weigh else plan
    return report_of(plan, histogram=histogram, test=test)[0].plans[0]


def texts_of(part):
    return {sentence.topic: sentence.text for sentence in summary(part)}


def test_the_headline_is_of_unseen_traffic_where_there_is_any():
    own = skewed()
    assert "25.0 % of the experts\u2019 bytes serve" in headline(part_of(own))
    assert headline(part_of(own)).endswith("of the traffic")
    assert headline(part_of(own, test=skewed(tokens=2000))).endswith("of traffic that the plan has not seen")


def test_the_headline_has_the_rate_of_the_evaluation():
    part = part_of(skewed())
    assert f"{100 * part.evaluation.in_sample:.1f} %" in headline(part)


@pytest.mark.parametrize(
    ("test", "fraction", "name"),
    [
        (None, 0.25, UNTESTED),
        (skewed(tokens=2000), 0.25, "holds"),
        (skewed(seed=9), 0.25, "chance"),
        (None, 1.0, "no-choice"),
    ],
)
def test_the_verdict_is_that_of_the_planner_or_not_tested(test, fraction, name):
    part = part_of(skewed(), test=test, fraction=fraction)
    assert name == verdict(part)[0]
    assert advice(part, name=name)


def test_every_verdict_has_an_advice():
    part = part_of(skewed())
    for name in [*WORDS, UNTESTED]:
        assert advice(part, name=name).endswith(".")


def test_what_more_budget_brings_is_read_off_the_curve():
    part = part_of(skewed(), test=skewed(tokens=2000))
    gain = 100 * (part.curves.at(0.35) - part.evaluation.held_out)
    assert f"about {gain:.1f} points more" in advice(part, name="holds")


def test_bytes_are_named_where_rows_have_bytes():
    assert (
        "24 of 96 experts (24.0 MiB of 96.0 MiB per rank)" in texts_of(part_of(skewed(), weigh=True))["In fast memory"]
    )
    assert "24 of 96 experts. " in texts_of(part_of(skewed()))["In fast memory"]
    staged = texts_of(part_of(skewed(), weigh=True, pp=2))["In fast memory"]
    assert "on one rank of every stage together" in staged


def test_the_weakest_layer_is_named_by_its_decoder_index():
    part = part_of(skewed())
    rates = part.evaluation.own.per_layer
    layer = part.plan.layers[rates.index(min(rates))]
    assert f"Layer {layer} is served {100 * min(rates):.1f} %" in texts_of(part)["Weakest layer"]


def test_without_unseen_traffic_the_summary_says_that_it_is_not_known():
    assert texts_of(part_of(skewed()))["On unseen traffic"].startswith("Not known")


def test_a_plan_that_is_chance_is_called_that():
    assert texts_of(part_of(skewed(), test=skewed(seed=9)))["Better than chance?"].startswith("No. ")


def test_a_test_that_is_the_plans_own_counts_is_not_called_unseen():
    part = part_of(skewed(), test=skewed())
    assert headline(part).endswith("of the traffic")
    assert UNTESTED == verdict(part)[0]


def test_counts_of_other_traffic_are_not_called_what_the_plan_was_made_from():
    part = report_of(plan_of(skewed()), histogram=skewed(seed=9))[0].plans[0]
    assert "of the traffic given, which the plan was not made from;" in texts_of(part)["In fast memory"]
