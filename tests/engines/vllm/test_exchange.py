"""What ranks tell each other before they load, and what happens where one does not answer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed

from hotsplit.engines.vllm import exchange
from hotsplit.errors import EngineError


@pytest.fixture
def world(monkeypatch):
    """world(2) -> vLLM's group of so many workers."""

    def make(size):
        group = SimpleNamespace(world_size=size, cpu_group="the CPU group")
        state = ModuleType("vllm.distributed.parallel_state")
        state.get_world_group = lambda: group
        for name in ("vllm", "vllm.distributed"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, state.__name__, state)
        return group

    return make


def test_a_worker_alone_asks_nobody(world, monkeypatch):
    world(1)
    for name in ("monitored_barrier", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, None)
    assert [{"a": 1}] == exchange.gather_of_all()({"a": 1})


def test_values_of_all_ranks_come_in_rank_order_after_all_have_arrived(world, monkeypatch):
    world(3)
    seen = []

    def gather(values, value, *, group):
        seen.append(("gather", group))
        values[:] = ["first", value, "third"]

    def barrier(group, *, timeout, wait_all_ranks):
        seen.append(("barrier", group, timeout, wait_all_ranks))

    monkeypatch.setattr(torch.distributed, "monitored_barrier", barrier)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert ["first", "mine", "third"] == exchange.gather_of_all()("mine")
    assert [("barrier", "the CPU group", exchange.WAIT, True), ("gather", "the CPU group")] == seen


def test_a_rank_that_does_not_answer_is_named_with_what_is_missing_there(world, monkeypatch):
    world(2)

    def barrier(*args, **kwargs):
        raise RuntimeError("Ranks 1 failed to pass monitoredBarrier in 600000 ms\nmore lines")

    monkeypatch.setattr(torch.distributed, "monitored_barrier", barrier)
    with pytest.raises(
        EngineError, match="Ranks 1 failed to pass .* ms; set the same HOTSPLIT_ variables on every"
    ) as caught:
        exchange.gather_of_all()("mine")
    assert "more lines" not in str(caught.value)
