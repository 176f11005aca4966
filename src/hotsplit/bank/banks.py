"""The one handle that an engine holds: rows, routes, kernel and the live loop of one rank.

banks = Banks(source, plan..., ...)             once, before the first step
banks.tick()                                    between steps, on the thread that launches them
with banks.step(phase=..., is_padding=...):     around a step
    banks.forward(layer_id, ...)                in every MoE layer
banks.close()                                   when the model goes

On a GPU the same face has other rows and kernels behind it: device_banks.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.build import Progress, build_pointer_rows, place_layers
from hotsplit.bank.cpu import CpuSwapBackend
from hotsplit.bank.kernels.exact import ExpertMath, Tensors, exact
from hotsplit.bank.kernels.fast import fast
from hotsplit.bank.live import Live
from hotsplit.bank.pointers import PointerRows, RowsOptions
from hotsplit.bank.route import Phase, Router, StepRouter, StepRouting
from hotsplit.bank.source import ExpertSource
from hotsplit.bank.swap import Swapper
from hotsplit.errors import BankError, ConfigError, EngineError
from hotsplit.plan.rebalance import RebalanceOptions
from hotsplit.plan.steering import make_policy

logger = logging.getLogger(__name__)

Kernel = Callable[..., torch.Tensor]

KERNELS: Mapping[str, Kernel] = {"exact": exact, "fast": fast}
"""Expert kernels by the name that HOTSPLIT_KERNEL gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BankOptions:
    """How the banks behave while the model runs."""

    top_k: int
    """Experts per token."""
    dynamic: bool = True
    """Whether hot experts follow the traffic."""
    dyn_steps: int = 2000
    """Steps between updates."""
    kernel: str = "exact"
    """Name in KERNELS."""
    rebalance: RebalanceOptions = field(default_factory=RebalanceOptions)
    """Margin, swaps per layer, half-life."""
    rows: RowsOptions = field(default_factory=RowsOptions)
    """How rows use this machine, on a CPU."""


class EngineBanks(Protocol):
    """What an engine drives, wherever the rows lie: Banks on a CPU, DeviceBanks on a GPU."""

    @property
    def device(self) -> torch.device:
        """Where steps run."""

    @property
    def name(self) -> str:
        """Of the backend, for metrics."""

    @property
    def router(self) -> StepRouter:
        """Row maps and counters."""

    @property
    def live(self) -> Live:
        """The loop that corrects the plan."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Held while counters or row maps change: readers of other threads take it."""

    @property
    def hot_bytes(self) -> int:
        """Bytes of fast memory taken."""

    @property
    def slot_bytes(self) -> int:
        """Of them, those of slots for cold rows."""

    @property
    def host_bytes(self) -> int | None:
        """Bytes of slow memory taken; None where cold rows stay in the checkpoint."""

    @property
    def observers(self) -> list[Callable[[StepRouting], None]]:
        """Called with what each step routed."""

    def tick(self) -> None:
        """Between two steps: count, publish, update."""

    def step(self, *, phase: Phase, is_padding: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Around one step."""

    def forward(
        self, layer_id: int, hidden_states: torch.Tensor, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One layer's routed experts."""

    def close(self) -> None:
        """Give everything back; twice is harmless."""


class StepMask:
    """The padding mask of the step under way; a layer that routes other tokens than it has goes without, which is said."""

    def __init__(self) -> None:
        self.is_padding: torch.Tensor | None = None
        """[T], bool; None for none."""
        self._has_warned = False

    def of(self, num_tokens: int) -> torch.Tensor | None:
        """The mask for so many tokens.

        Args:
            num_tokens: That a layer routes.
        """
        if self.is_padding is None or self.is_padding.numel() == num_tokens:
            return self.is_padding
        if not self._has_warned:
            self._has_warned = True
            what = "the padding mask has %d tokens and a layer routes %d: padding, if any, counts as traffic"
            logger.warning(what, self.is_padding.numel(), num_tokens)
        return None


class Banks:
    """Hot and cold rows of all MoE layers of one rank, driven by an engine.

    Args:
        source: Where the experts lie.
        hot: Hot expert ids per layer, most wanted first, L of them.
        prior: Counts that the plan was made from, [L, E]; None where there were none.
        options: Behaviour.
        on_progress: Told bytes done and in all while hot rows are read.

    Raises:
        BankError: Memory or a file failed.
        ConfigError: The kernel is not known.
    """

    def __init__(
        self,
        source: ExpertSource,
        *,
        hot: Sequence[Sequence[int]],
        prior: npt.NDArray[np.float64] | None,
        options: BankOptions,
        on_progress: Progress | None = None,
    ) -> None:
        if options.kernel not in KERNELS:
            raise ConfigError("kernel", got=repr(options.kernel), wanted=" or ".join(KERNELS))
        self.kernel = options.kernel
        """Name of what computes the experts."""
        self._kernel = KERNELS[options.kernel]
        self._source = source
        layers = place_layers(hot, num_experts=source.num_experts, dynamic=options.dynamic, inclusive=True)
        row_bytes = [layout.num_bytes for layout in source.layouts]
        self.rows: PointerRows = build_pointer_rows(
            source, hot=hot, layers=layers, options=options.rows, on_progress=on_progress
        )
        """Memory behind the rows."""
        # Padding computes what the stock engine computes: the exact kernel promises equality for every token.
        self.router = Router(layers, row_bytes=row_bytes, redirect_padding=False, kept=self.rows.kept)
        """Row maps and counters."""
        self.live = Live(self.router, plan_shares=prior, row_bytes=row_bytes, dyn_steps=options.dyn_steps)
        """The loop that corrects the plan."""
        # Reentrant: a model may be closed, or looked at, from inside of its own step.
        self.lock: contextlib.AbstractContextManager[object] = threading.RLock()
        """Held by a step, and by whoever looks at the counters or closes: they wait for a step that another thread runs."""
        self.on_close: list[Callable[[], None]] = []
        """What else ends with the banks: called once."""
        self._maths: dict[int, ExpertMath] = {}
        self._pid = os.getpid()
        self._step = 0
        self._phase: Phase = "prefill"
        self._mask = StepMask()
        self._swaps: CpuSwapBackend | None = None
        if options.dynamic:
            self._swaps = CpuSwapBackend(self.rows, router=self.router, files=source.files)
            rebalancer = make_policy(
                hot=self.router.hot_mask(),
                prior=prior,
                top_k=options.top_k,
                options=options.rebalance,
                row_bytes=row_bytes,
            )
            self.live.adapt(Swapper(self._swaps, layouts=layers), rebalancer=rebalancer)

    device: torch.device = torch.device("cpu")
    """Where steps run."""
    name = "cpu-pointers"
    """Of the backend, for metrics."""
    host_bytes = None
    """Cold rows stay in the checkpoint's files."""

    @property
    def hot_bytes(self) -> int:
        """Bytes of fast memory taken: hot rows, spare rows and slots."""
        return self.rows.hot_bytes

    @property
    def slot_bytes(self) -> int:
        """Of them, those of slots for cold rows."""
        return self.rows.slot_bytes

    @property
    def observers(self) -> list[Callable[[StepRouting], None]]:
        """Called with what each step routed, when it is counted."""
        return self.router.observers

    def use_math(self, layer_id: int, math: ExpertMath) -> None:
        """Tell what a layer's experts compute; before the first forward.

        Args:
            layer_id: Ordinal among MoE layers.
            math: As the engine read it off its module.
        """
        self._maths[layer_id] = math

    @contextlib.contextmanager
    def step(self, *, phase: Phase, is_padding: torch.Tensor | None) -> Iterator[None]:
        """Around one step: it is counted by the next tick(), and not at all when it breaks off.

        Args:
            phase: Of the whole step.
            is_padding: The engine's padding mask, [T], bool; None for none.
        """
        with self.lock:
            self.begin_step(phase=phase, is_padding=is_padding)
            try:
                yield
            except BaseException:
                self.abandon_step()
                raise

    def begin_step(self, *, phase: Phase, is_padding: torch.Tensor | None) -> None:
        """Say what kind of step follows.

        Args:
            phase: Of the whole step.
            is_padding: The engine's padding mask, [T], bool; None for none.
        """
        self._step += 1
        self._phase, self._mask.is_padding = phase, is_padding

    def forward(
        self, layer_id: int, hidden_states: torch.Tensor, *, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One layer's routed experts.

        Args:
            layer_id: Ordinal among MoE layers.
            hidden_states: Tokens, [T, D].
            topk_ids: Expert ids, [T, K], integer.
            topk_weights: Router weights, [T, K].

        Returns:
            Outputs, [T, D].

        Raises:
            BankError: A cold row could not be read.
        """
        is_padding = self._mask.of(topk_ids.shape[0])
        row_ids = self.router.route(layer_id, topk_ids, is_padding=is_padding, phase=self._phase, step=self._step)
        bank = _LayerView(self.rows, layer_id=layer_id)
        output = self._kernel(
            hidden_states,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            row_ids=row_ids,
            bank=bank,
            math=self._maths[layer_id],
        )
        self.rows.guard.require_whole()  # else zeros were computed with
        return output

    def abandon_step(self) -> None:
        """Forget the step under way: it broke off, and half a step's counts would fit nothing."""
        self.router.discard()

    def tick(self) -> None:
        """Between two steps: count, publish, update.

        Raises:
            BankError: The third update in a row failed, the banks are closed, or the model's files have changed.
        """
        with self.lock:
            self.rows.require_whole()
            if self._pid != os.getpid() and self._swaps is not None:
                raise BankError("a process that was forked", got="no copying thread", do="load the model in the child")
            self.live.tick()

    def __reduce__(self) -> NoReturn:
        """Neither copied nor pickled: rows are memory and files of this process."""
        raise EngineError("a hotsplit model cannot be copied or pickled", do="load it again where it is needed")

    def close(self) -> None:
        """Count the last step, stop the copies, let memory and files go; twice is harmless. Another thread's step ends first."""
        with self.lock:
            self.router.flush()
            if self._swaps is not None:
                self._swaps.close()
                self._swaps = None
            while self.on_close:
                self.on_close.pop()()
            self.rows.close()


class _LayerView:
    """The rows of one layer, as a kernel sees them (a LayerBank)."""

    def __init__(self, rows: PointerRows, *, layer_id: int) -> None:
        self._rows, self._layer_id = rows, layer_id
        self.first_cold = rows.first_cold(layer_id)

    def tensors(self, row: int) -> Tensors:
        return self._rows.tensors(self._layer_id, row)

    def ask(self, rows: Iterable[int]) -> None:
        self._rows.ask(self._layer_id, rows)

    def arrivals(self, rows: Iterable[int]) -> Iterator[int]:
        return self._rows.arrivals(self._layer_id, rows)
