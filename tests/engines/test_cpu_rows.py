"""Rows on a CPU as load() makes them: cold ones by what memory is left, hot ones by NUMA policy, all of it in the budget."""

from __future__ import annotations

import logging

import pytest
import torch

from engines import tiny
from engines.conftest import budget
from hotsplit.engines.transformers import cpu, cpu_rows
from hotsplit.errors import BankError, ConfigError
from hotsplit.host.numa import Placement

pytestmark = pytest.mark.transformers

ROWS = {"dynamic": False, "hot": 0.9}


@pytest.fixture(autouse=True)
def listen(caplog):
    caplog.set_level(logging.INFO, logger="hotsplit")


def equals_stock(expected, folder, model):
    return [torch.equal(*pair) for pair in zip(expected(folder), tiny.play(model), strict=True)]


def lines(caplog):
    return [message for message in caplog.messages if "of cold rows are read" in message]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_direct_reads_give_stocks_outputs_to_the_bit_inside_of_the_budget(
    checkpoint, expected, load, full, caplog, model_type
):
    folder = checkpoint(model_type)
    model = load(folder, **ROWS)
    rows = model.hotsplit.banks.rows
    assert rows.slot_bytes > 0
    assert rows.hot_bytes <= budget(folder, 0.9) * 2**30 + 1
    hot = int((model.hotsplit.banks.router.hot_mask().sum(axis=1) * model.hotsplit.sizes.row_bytes).sum())
    assert model.hotsplit.snapshot().hot_bytes == rows.hot_bytes >= hot + rows.slot_bytes
    assert model.hotsplit.snapshot().budget_bytes >= rows.hot_bytes, "slots are of the budget"
    assert ["directly, past the page cache" in line for line in lines(caplog)] == [True]
    assert [True] * 3 == equals_stock(expected, folder, model)
    counts = rows.cold_counts
    assert counts.staged_rows + counts.kept_rows > 0


def test_memory_for_all_cold_rows_leaves_them_to_the_page_cache(checkpoint, expected, load, caplog):
    folder = checkpoint("qwen3_moe")
    model = load(folder, **ROWS)
    assert ["through the page cache" in line for line in lines(caplog)] == [True]
    assert [True] * 3 == equals_stock(expected, folder, model)
    assert 0 == model.hotsplit.banks.rows.cold_counts.staged_rows


def test_a_budget_at_its_least_has_no_slots_and_still_runs(checkpoint, expected, load, full):
    folder = checkpoint("qwen3_moe")
    model = load(folder, hot=0.5)
    assert 0 == model.hotsplit.banks.rows.slot_bytes
    assert [True] * 3 == equals_stock(expected, folder, model)


def test_the_numa_policy_reaches_the_arena(checkpoint, load, monkeypatch):
    asked = []

    def choose(policy):
        asked.append(policy)
        return Placement(policy=policy, node=0), []

    monkeypatch.setattr(cpu_rows, "choose_cpu_placement", choose)
    model = load(checkpoint("qwen3_moe"), numa_policy="bind")
    assert ["bind"] == asked
    assert Placement(policy="bind", node=0) == model.hotsplit.banks.rows._arena._placement
    said = {notice.name for notice in model.hotsplit.notices}
    assert not {"numa-elsewhere"} & said


def test_where_there_is_nothing_to_choose_only_who_asked_is_told(checkpoint, load):
    real = cpu_rows.choose_cpu_placement
    for policy, said in ((None, False), ("preferred", True), ("off", False)):
        settings = {} if policy is None else {"numa_policy": policy}
        model = load(checkpoint("qwen3_moe"), **settings)
        if real("preferred")[0].node is not None:
            pytest.skip("a machine with several NUMA nodes")
        names = {notice.name for notice in model.hotsplit.notices}
        assert said == bool(names & {"numa-one-node", "numa-none"})


def test_bind_where_no_node_can_be_named_is_refused_before_anything_is_read(checkpoint, load, monkeypatch):
    def refuse(_):
        raise BankError("HOTSPLIT_NUMA_POLICY=bind", got="no nodes")

    monkeypatch.setattr(cpu_rows, "choose_cpu_placement", refuse)
    with pytest.raises(BankError, match="HOTSPLIT_NUMA_POLICY=bind"):
        load(checkpoint("qwen3_moe"), numa_policy="bind")


def test_memory_without_room_for_hot_experts_is_said_where_nobody_gave_a_budget(checkpoint, load, monkeypatch):
    folder = checkpoint("qwen3_moe")
    monkeypatch.setattr(cpu, "default_hot_bytes", lambda sizes, *, reserve_bytes: 0)
    text = (
        "no room for hot experts: all are read from the disk; set HOTSPLIT_HOT_GIB, or lower HOTSPLIT_VRAM_RESERVE_GIB"
    )
    said = [str(notice) for notice in load(folder, hot_gib=None, dynamic=False).hotsplit.notices]
    assert [True] == [text in one for one in said if "[nothing-hot]" in one]
    with pytest.raises(ConfigError, match="no room for hot experts"):
        load(folder, hot_gib=None, dynamic=False, strict=True)
    assert not [one for one in load(folder, hot=0.5, dynamic=False).hotsplit.notices if one.name == "nothing-hot"]
