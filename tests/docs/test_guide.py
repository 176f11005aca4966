"""The numbers of the guide are the planner's, the policy's and the bundled model's, in every language."""

from __future__ import annotations

import re

import numpy as np
import pytest

from doc_pages import DOCS, blocks_of, inline_code, sections
from hotsplit.config import HotsplitConfig
from hotsplit.metrics import UpdateLine
from hotsplit.plan.planner import USEFUL, PlanOptions, make_plan
from hotsplit.plan.rebalance import RebalanceOptions, Rebalancer
from hotsplit.plan.rerank import MIN_TOKENS
from hotsplit.plan.verdict import FEW_PAIRS
from plan_builders import histogram_of, sizes_of

PAGES = {language: DOCS / language / "how-expert-balance-works.md" for language in ("en", "ru", "zh")}
ENGLISH = PAGES["en"].read_text(encoding="utf-8")
MB = 10**6
ROWS_MB = (10, 20)
BUDGET_MB = 60
TOP_K = 2


def section(title):
    """The section of a title in the English page."""
    (found,) = [each for each in sections(ENGLISH) if each.title == title]
    return found


def rows(prose):
    """Cells of the rows below the rule of a table."""
    lines = [line for line in prose.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines[2:]]


TABLE = rows(section("An example to check by hand").prose)
TRAIN_LE = np.array([int(row[2]) for row in TABLE]).reshape(2, 4)
JUDGED = section("Judging: held-out, null, oracle")
TEST_LE = np.array(re.findall(r"(\d+), (\d+), (\d+), (\d+)\s+in\s+layer", JUDGED.prose), dtype=np.int64)


@pytest.fixture(scope="module")
def planned():
    """The plan of the example."""
    plan, notices = make_plan(
        sizes_of([mb * MB for mb in ROWS_MB], num_experts=4, top_k=TOP_K),
        histogram=histogram_of(TRAIN_LE, top_k=TOP_K),
        budget_bytes=BUDGET_MB * MB,
        options=PlanOptions(dynamic=False, test=histogram_of(TEST_LE, top_k=TOP_K)),
    )
    assert [] == notices
    return plan


def cold_mb(hot, *, counts):
    """MB of cold experts that a token reads: top-k of each layer, those that are cold."""
    return sum(
        TOP_K * row_mb * (1 - sum(row[list(chosen)]) / row.sum())
        for row_mb, chosen, row in zip(ROWS_MB, hot, counts, strict=True)
    )


def test_the_table_is_the_planners_choice(planned):
    assert [["0", "1"], ["0", "1"]] == [[str(expert) for expert in sorted(hot)] for hot in planned.hot]
    assert (BUDGET_MB * MB, BUDGET_MB * MB) == (planned.stages[0].used_bytes, sum(ROWS_MB) * 4 * MB // 2)
    for layer, expert, chosen, share, per_ten_mb, place in TABLE:
        worth = int(chosen) / TRAIN_LE[int(layer)].sum()
        assert (worth, worth / ROWS_MB[int(layer)] * 10) == pytest.approx((float(share), float(per_ten_mb)))
        assert ("hot" if int(expert) in planned.hot[int(layer)] else "cold") == place


def test_the_rates_are_those_of_the_proof(planned):
    proof = planned.proof
    rates = {row[0]: float(row[1]) for row in rows(JUDGED.prose)}
    assert {
        "in-sample": proof.hit_rate,
        "held-out": proof.held_out,
        "null": proof.null,
        "oracle": proof.oracle_reachable,
    } == rates
    assert f"**hit\nrate** of {proof.hit_rate}." in section("An example to check by hand").prose


def test_the_bytes_and_the_times_are_right(planned):
    text = " ".join(ENGLISH.split())
    read, blind = cold_mb(planned.hot, counts=TRAIN_LE), sum(TOP_K * mb / 2 for mb in ROWS_MB)
    assert f"= {read:.1f} MB of cold experts" in text
    assert f"it would be {blind:.0f} MB" in text
    assert f"a link of 25 GB/s that is {read / 25:.3f} ms instead of {blind / 25:.1f} ms" in text
    after = cold_mb([[0, 2], [0, 2]], counts=TEST_LE)
    assert (
        f"a token reads {after:.0f} MB of cold experts instead of {cold_mb(planned.hot, counts=TEST_LE):.0f} MB" in text
    )


def test_the_swaps_are_those_of_the_policy(planned):
    hot_LE = np.array([[expert in hot for expert in range(4)] for hot in planned.hot])
    policy = Rebalancer(hot=hot_LE, prior=None, top_k=TOP_K, options=RebalanceOptions())
    swaps = policy.update(TEST_LE.astype(np.float64), tokens=100)
    assert {(0, 2, 1), (1, 2, 1)} == {(swap.layer_id, swap.expert_in, swap.expert_out) for swap in swaps}
    text = " ".join(ENGLISH.split())
    assert "in layer 0 expert 2 for expert 1" in text
    assert "in layer 1 expert 2 for expert 1" in text
    margin = HotsplitConfig().dyn_margin
    for i in range(2):
        assert f"as {TEST_LE[i, 2]} is more than {margin} x {TEST_LE[i, 1]} = {margin * TEST_LE[i, 1]:g}" in text
    for swap in swaps:
        policy.published(swap)
    assert () == policy.update(TEST_LE.astype(np.float64), tokens=100)


def test_the_thresholds_are_those_of_the_sources():
    text = " ".join(ENGLISH.split())
    assert (0.02, 50_000, 20) == (USEFUL, MIN_TOKENS, FEW_PAIRS)
    assert "not two points better than null" in text
    assert f"{MIN_TOKENS} decoded tokens in every layer" in text
    assert f"Fewer than {FEW_PAIRS} choices per expert" in text


@pytest.mark.parametrize("language", PAGES)
def test_every_field_of_the_update_line_is_explained(language):
    text = PAGES[language].read_text(encoding="utf-8")
    (line,) = [line for block in blocks_of(text) for line in block.lines if line.startswith("hotsplit update=")]
    told = UpdateLine.parse(line)
    assert line == str(told)
    cells = [row for part in sections(text) for row in rows(part.prose) if row[0].startswith("`")]
    named = [name for row in cells for name in inline_code(row[0])]
    at_times = ["kept", "shifts"]
    assert [name for name in UpdateLine.__slots__ if name not in at_times] == named
    assert all(f"`{name}`" in text for name in at_times)
    shown = [value for row in cells for value in row[1].split(", ")]
    assert [part.partition("=")[2] for part in line.split()[1:]] == shown
