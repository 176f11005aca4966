"""A vLLM plugin for tests alone: two banks on a CPU, where the product has them on GPUs only.

Put this folder's parent on PYTHONPATH and set TWO_BANKS; vLLM loads it beside hotsplit in every process.

    TWO_BANKS=honour   vLLM's CPU kernel is taught to honour an expert map, by what a map means and nothing else
    TWO_BANKS=stock    it is left as it is: it ignores the map

Memory is TwoBankMemory over a fake driver, so cold rows lie in host pages of their own. The banks' rows, swaps, calls and
proofs are the product's. `collective_rpc("hotsplit_probe", args=(command,))` answers "report" and "shift maps".
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hotsplit.bank.fake_driver import FakeDriver

_done: list[int] = []
"""Processes that have been prepared: vLLM asks for plugins more than once."""


class AnyThread(FakeDriver):
    """Its context is current wherever rows are copied: on a CPU a worker thread does that."""

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        self.make_current()
        super().copy(target, source=source, num_bytes=num_bytes, stream=stream)


def register() -> None:
    """Called by vLLM in every process."""
    how = os.environ.get("TWO_BANKS")  # noqa: TID251 - the plugin's own variable
    if how is None or os.getpid() in _done:
        return
    _done.append(os.getpid())
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from hotsplit.engines.vllm import backends

    if how == "honour":
        CPUUnquantizedExperts.apply = _honouring(CPUUnquantizedExperts.apply)
    backends.BACKENDS = {"cpu": _two_banks}
    WorkerWrapperBase.hotsplit_probe = lambda _, command: _run_command(command)


def _two_banks(options: Any) -> Any:
    from hotsplit.bank.range_devices import HostDevice
    from hotsplit.bank.tensor_at import cpu_tensor
    from hotsplit.bank.two_banks import TwoBankMemory
    from hotsplit.engines.vllm.backends import Backend

    memory = TwoBankMemory(AnyThread(), tensor_at=cpu_tensor, synchronise=lambda: None)
    return Backend(name="cuda-two-banks", memory=memory, device=HostDevice(), close=lambda: None)


def _honouring(stock: Any) -> Any:
    """The kernel with pairs that have no row left out: another row's result with a weight of nothing."""

    def apply(self: Any, **given: Any) -> None:
        expert_map = given["expert_map"]
        if expert_map is not None:
            local_TK = expert_map[given["topk_ids"].long()]
            given["topk_weights"] = torch.where(local_TK >= 0, given["topk_weights"], 0)
            given["topk_ids"] = local_TK.clamp(min=0).to(given["topk_ids"].dtype)
        stock(self, **given)

    return apply


def _run_command(command: str) -> dict[str, Any]:
    from hotsplit.engines.vllm import session

    current = session.current()
    views = [view for module in current.layers for view in module.hotsplit_calls.views]
    if command == "shift maps":
        for view in views:
            view._expert_map.copy_(view._expert_map.roll(1))
    held = current.banks.rows.memory.driver.held
    return {
        "banks": [len(module.hotsplit_calls.views) for module in current.layers],
        "rows": [len(view.w13_weight) for view in views],
        "registrations": held.registrations,
        "row_map": [one.tolist() for one in current.banks.router.row_map],
    }
