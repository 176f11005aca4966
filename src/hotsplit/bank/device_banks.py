"""The handle of an engine whose experts we compute ourselves on a GPU: rows, routes, kernels, swaps and the live loop.

The counterpart of banks.py, which holds pointer rows on a CPU, with the same face:

    banks = DeviceBanks(experts, hot=..., ...)      every row read, laid out, copied and looked at
    banks.tick()                                    between two steps, on the thread that launches them
    with banks.step(phase=..., is_padding=...):     around a step
        banks.forward(layer_id, ...)                in every MoE layer: route, then the kernels over the rows
    banks.close()                                   when the model goes

In one address range an expert's place decides no bit. In two banks (two_banks.py) a layer is two calls and their sum:
each call leaves out the pairs of the other, and the sum rounds otherwise than one call does.

Nothing here waits for the device during a step.

Shapes: L MoE layers, E experts, T tokens, K top-k, D model dim.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.banks import BankOptions, StepMask
from hotsplit.bank.build import Progress, place_layers
from hotsplit.bank.cuda_open import CudaKit
from hotsplit.bank.device_fill import allocate, fill
from hotsplit.bank.device_router import READ_PER_UPDATE, DeviceRouter
from hotsplit.bank.kernels.reference import ExpertRows
from hotsplit.bank.live import Live
from hotsplit.bank.range_banks import RangeBankOptions, RangeBanks
from hotsplit.bank.range_devices import ClosableSwaps, CudaDevice
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.route import Phase, StepRouter, StepRouting
from hotsplit.bank.row_format import FormedExperts, Tensors, workspace_bytes
from hotsplit.bank.rows import LayerRows
from hotsplit.bank.two_banks import bank_row_ids
from hotsplit.errors import BankError, EngineError

logger = logging.getLogger(__name__)

WORKSPACE_BYTES: Final = 512 << 20
"""What the kernels may take while they run: a longer prompt is computed in pieces. It does not depend on placement."""

ExpertsKernel = Callable[..., torch.Tensor]
"""bank.kernels.rows_triton.experts, or its twin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts:
    """What a device brings: a GPU, or what stands in for one."""

    kit: CudaKit
    """Memory for rows, router and swaps."""
    experts: ExpertsKernel
    """Computes with the rows."""


class DeviceBanks:
    """Hot and cold rows of all MoE layers on one GPU, driven by an engine.

    Args:
        experts: Where they lie, and how the kernels want them.
        hot: Hot expert ids per layer, most wanted first, [L].
        prior: Counts that the plan was made from, [L, E]; None where there were none.
        options: Behaviour.
        parts: The device.
        on_progress: Told bytes done and in all while rows are read.

    Raises:
        BankError: Memory, a file or the device failed; everything taken is given back.
    """

    def __init__(
        self,
        experts: FormedExperts,
        *,
        hot: Sequence[Sequence[int]],
        prior: npt.NDArray[np.float64] | None,
        options: BankOptions,
        parts: DeviceParts,
        on_progress: Progress | None = None,
    ) -> None:
        self._kit, self._experts = parts.kit, parts.experts
        self._forms, self._top_k = tuple(experts.forms), options.top_k
        num_experts, dynamic = experts.source.num_experts, options.dynamic
        self._layers = place_layers(hot, num_experts=num_experts, dynamic=dynamic, inclusive=False)
        self.rows = RangeRows(self._layers, memory=self._kit.memory)
        """Memory behind the rows."""
        try:
            with self.on_device():
                self._tensors = allocate(self.rows, forms=self._forms, layers=self._layers, device=self.device)
                self._calls = [self._layer_calls(layer_id) for layer_id in range(len(self._layers))]
                fill(self.rows, experts, layers=self._layers, tensors=self._tensors, on_progress=on_progress)
                self.rows.memory.require_placed(self.rows.ranges)
                self._banks = RangeBanks(
                    self.rows,
                    layers=self._layers,
                    prior=prior,
                    options=_range_options(options),
                    device=_PaddingKept(device=self._kit.device),
                )
        except BaseException:
            if self._has_settled():
                with self.on_device():
                    self.rows.close()
            raise
        self.observers: list[Callable[[StepRouting], None]] = []
        """Called after every step with what it routed; the device is waited for while there are any."""
        self._seen: list[tuple[int, torch.Tensor]] = []
        self._mask = StepMask()
        self._num_steps = 0
        self._thread = threading.local()
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def device(self) -> torch.device:
        """Where steps run."""
        return self._kit.device.device

    @property
    def name(self) -> str:
        """Of the backend, for metrics."""
        return self._kit.name

    @property
    def router(self) -> StepRouter:
        """Row maps and counters."""
        return self._banks.router

    @property
    def live(self) -> Live:
        """The loop that corrects the plan."""
        return self._banks.live

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Held while counters or row maps change."""
        return self._banks.lock

    @property
    def hot_bytes(self) -> int:
        """Bytes of fast memory taken, whole pages."""
        return self.rows.hot_bytes

    @property
    def slot_bytes(self) -> int:
        """None of them: a GPU reads cold rows in place."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of slow memory taken, whole pages."""
        return self.rows.host_bytes

    @property
    def num_banks(self) -> int:
        """1 where every layer is one call, 2 where it is two."""
        return self._kit.memory.num_banks

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Triton launches on the current device, whatever device its arguments lie on: around what launches kernels."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def tick(self) -> None:
        """Between two steps: publish what is copied, update when it is time.

        Raises:
            BankError: The third update in a row failed, the banks are closed, or the process was forked.
        """
        self._require_open()
        with self.on_device():
            if not getattr(self._thread, "has_entered", False):
                self._kit.make_current()
                self._thread.has_entered = True
            self._banks.tick()

    @contextlib.contextmanager
    def step(self, *, phase: Phase, is_padding: torch.Tensor | None) -> Iterator[None]:
        """Around one step. What the device has counted of one that breaks off stays counted.

        Args:
            phase: Of the whole step.
            is_padding: The engine's padding mask, [T], bool, on the device; None for none.
        """
        self._mask.is_padding, self._seen = is_padding, []
        self._num_steps += 1
        with self.on_device(), self._banks.step(phase):
            yield
        if self.observers and self._seen:
            layer_ids, ids = zip(*self._seen, strict=True)
            mask = None if is_padding is None else is_padding.cpu()
            seen = StepRouting(step=self._num_steps, phase=phase, layer_ids=layer_ids, topk_ids=ids, is_padding=mask)
            for observe in self.observers:
                observe(seen)

    def forward(
        self, layer_id: int, hidden_states: torch.Tensor, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One layer's routed experts.

        Args:
            layer_id: Ordinal among MoE layers.
            hidden_states: Tokens, [T, D], of the type that the rows compute with.
            topk_ids: Expert ids, [T, K], integer.
            topk_weights: Router weights, [T, K].

        Returns:
            Outputs, [T, D].
        """
        self._require_open()
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.long()
        with self.on_device():
            row_ids = self._banks.route(layer_id, topk_ids, is_padding=self._mask.of(len(topk_ids)))
            if self.observers:
                self._seen.append((layer_id, topk_ids.cpu()))
            num_tokens = self._tokens_at_once(layer_id, hidden_states)
            if len(hidden_states) <= num_tokens:
                return self._compute(layer_id, hidden_states, row_ids=row_ids, topk_weights=topk_weights)
            pieces = zip(*(one.split(num_tokens) for one in (hidden_states, row_ids, topk_weights)), strict=True)
            return torch.cat(
                [self._compute(layer_id, tokens, row_ids=ids, topk_weights=w) for tokens, ids, w in pieces]
            )

    def expert(self, layer_id: int, expert: int) -> Tensors:
        """An expert's tensors as the kernels have them, copied to the CPU: for proofs, not for steps.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
        """
        row = int(self.router.row_map[layer_id, expert])
        tensors = self._forms[layer_id].tensors
        copied = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in tensors.items()}
        for where, target in zip(self.rows.tensors(layer_id), copied.values(), strict=True):
            self.rows.memory.copy([(target.data_ptr(), where.address_of(row))], num_bytes=where.row_bytes)
        return copied

    def __reduce__(self) -> NoReturn:
        """Neither copied nor pickled: rows are memory of this process and its device."""
        raise EngineError("a hotsplit model cannot be copied or pickled", do="load it again where it is needed")

    def close(self) -> None:
        """Wait for the device, stop the copies, give the memory back; twice is harmless, and so is a forked child's."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pid != os.getpid() or not self._has_settled():
            return
        with self.on_device():
            self._calls, self._tensors = [], []
            self._banks.close()

    def _has_settled(self) -> bool:
        """Whether nothing that runs needs the rows any more; a device that has failed says nothing, and keeps them."""
        try:
            with self.on_device():
                self._kit.make_current()  # whoever lets the last model go may be any thread
                self._kit.synchronise()
        except RuntimeError as error:
            logger.warning("memory of the rows goes with the process: %s", error)
            return False
        return True

    def _compute(
        self, layer_id: int, tokens: torch.Tensor, *, row_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        calls = self._calls[layer_id]
        if self.num_banks == 1:
            return self._experts(tokens, row_ids=row_ids, topk_weights=topk_weights, rows=calls[0])
        ids = bank_row_ids(row_ids, first_cold=self._layers[layer_id].first_cold)
        outputs = [
            self._experts(tokens, row_ids=mine, topk_weights=topk_weights, rows=rows)
            for mine, rows in zip(ids, calls, strict=True)
            if rows is not None
        ]
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _layer_calls(self, layer_id: int) -> list[ExpertRows | None]:
        """What the kernel is called with, for each bank; None for one that has no rows."""
        form, layer, tensors = self._forms[layer_id], self._layers[layer_id], self._tensors[layer_id]
        if self.num_banks == 1:
            whole = {name: parts[0] for name, parts in tensors.items()}
            return [form.rows(whole, first_cold=layer.first_cold)]
        banks: list[ExpertRows | None] = []
        for bank, first_cold in ((0, layer.first_cold), (1, 0)):
            mine = {name: parts[bank] for name, parts in tensors.items()}
            banks.append(form.rows(mine, first_cold=first_cold) if len(mine["down"]) else None)
        return banks

    def _tokens_at_once(self, layer_id: int, hidden_states: torch.Tensor) -> int:
        form = self._forms[layer_id]
        per_token = workspace_bytes(form, top_k=self._top_k, itemsize=hidden_states.itemsize)
        return max(1, WORKSPACE_BYTES // per_token)

    def _require_open(self) -> None:
        if self._is_closed:
            raise BankError("the banks are closed", do="load the model again")
        if self._pid != os.getpid():
            raise BankError("a process that was forked", got="no device", do="load the model in the child")


def _range_options(options: BankOptions) -> RangeBankOptions:
    return RangeBankOptions(
        top_k=options.top_k, dynamic=options.dynamic, dyn_steps=options.dyn_steps, rebalance=options.rebalance
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PaddingKept:
    """A device whose router leaves padding its experts: outputs of all tokens are what the stock engine computes."""

    device: CudaDevice

    def is_capturing(self) -> bool:
        return self.device.is_capturing()

    def router(
        self, layers: Sequence[LayerRows], *, row_bytes: Sequence[int], dyn_steps: int, copies_ids: bool
    ) -> DeviceRouter:
        return DeviceRouter(
            layers,
            row_bytes=row_bytes,
            device=self.device.device,
            kernels=self.device.kernels,
            read_every_steps=max(1, dyn_steps // READ_PER_UPDATE),
            redirect_padding=False,
        )

    def swaps(self, rows: RangeRows, *, router: StepRouter) -> ClosableSwaps:
        return self.device.swaps(rows, router=router)
