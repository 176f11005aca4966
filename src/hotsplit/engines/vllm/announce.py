"""What a worker says when its model is loaded: what is effective, not what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.record import RunFacts
from hotsplit.engines.vllm.planning import Prepared
from hotsplit.notices import Notice
from hotsplit.units import gib

logger = logging.getLogger(__name__)


def loaded(
    prepared: Prepared, *, memory: RangeRows, facts: RunFacts, notices: Sequence[Notice], left_alone: Sequence[str]
) -> None:
    """Verify where every row really lies, and say what runs.

    Args:
        prepared: What was planned.
        memory: The rows.
        facts: Of the run.
        notices: What was noticed while loading.
        left_alone: Layers of routed experts that are not served.

    Raises:
        BankError: A row does not lie where the plan wants it.
    """
    for notice in notices:
        logger.warning("hotsplit: %s", notice)
    memory.memory.require_placed(memory.ranges)
    if left_alone:
        logger.info("left alone, as they are no layers of the plan: %s", ", ".join(left_alone))
    logger.info("%s", _effective(prepared, memory=memory, facts=facts))


def _effective(prepared: Prepared, *, memory: RangeRows, facts: RunFacts) -> str:
    """One line with everything that a reader of the log looks for."""
    stage, proof = prepared.stage, prepared.choice.plan.proof
    num_hot = sum(len(experts) for experts in stage.hot)
    num_all = len(stage.layers) * (stage.identity.num_experts or 0)
    rate = "unknown" if proof.hit_rate is None else f"{proof.hit_rate:.3f}"
    if proof.held_out is not None:
        rate = f"{proof.held_out:.3f} (held-out)"
    parts: dict[str, Any] = {
        "plan": facts.plan_hash[:12],
        "mode": "dynamic" if facts.dynamic else "static",
        "layers": len(stage.layers),
        "hot_rows": f"{num_hot} of {num_all}",
        "hot": gib(memory.hot_bytes),
        "host": gib(memory.host_bytes),
        "budget": gib(facts.budget_bytes),
        "expected_hit": rate,
        "backend": facts.backend,
        "rank": facts.rank,
    }
    listed = " ".join(f"{name}={value}" for name, value in parts.items())
    return f"hotsplit is on: {listed}; {prepared.choice.origin}"
