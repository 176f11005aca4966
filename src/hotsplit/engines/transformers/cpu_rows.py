"""What load() decides about rows on a CPU before there are any: how cold ones are read, and where hot ones lie."""

from __future__ import annotations

from hotsplit.bank.cold_choice import ColdChoice, choose_cold, slot_needs
from hotsplit.bank.pointers import RowsOptions
from hotsplit.config import HotsplitConfig
from hotsplit.engines.transformers.opening import Opened
from hotsplit.host.memory import memory_limits
from hotsplit.host.numa import choose_cpu_placement
from hotsplit.notices import Notice

_IDLE = frozenset({"numa-one-node", "numa-none"})
"""Notices that only who has set HOTSPLIT_NUMA_POLICY wants to hear."""


def cold_choice(opened: Opened, *, budget: int, config: HotsplitConfig) -> ColdChoice:
    """How cold rows are to be read, by what memory hot rows and dense weights leave to the page cache.

    Args:
        opened: The model.
        budget: Hot bytes.
        config: Settings. A plan file takes the whole budget, and a plan that is made needs its least.
    """
    sizes, available = opened.sizes, memory_limits().available_bytes
    top_k = sizes.identity.top_k or 1
    least = int(sizes.row_bytes.sum()) * (top_k + 1) if config.dynamic else 0
    return choose_cold(
        expert_bytes=sizes.expert_bytes,
        cold_bytes=sizes.expert_bytes - budget,
        cache_bytes=None if available is None else available - sizes.dense_bytes - budget,
        room_bytes=0 if config.plan is not None else max(budget - least, 0),
        needs=slot_needs(opened.source),
        top_k=top_k,
    )


def rows_options(cold: ColdChoice, *, config: HotsplitConfig) -> tuple[RowsOptions, list[Notice]]:
    """How rows use this machine, and what must be said about it.

    Args:
        cold: How cold rows are read.
        config: Settings.

    Raises:
        BankError: HOTSPLIT_NUMA_POLICY=bind where no node can be named.
    """
    placement, notices = choose_cpu_placement(config.numa_policy)
    if config.origin("numa_policy") == "default":
        notices = [notice for notice in notices if notice.name not in _IDLE]
    options = RowsOptions(is_direct=cold.is_direct, slots=cold.slots, slot_bytes=cold.slot_bytes, placement=placement)
    return options, notices
