"""The fast kernel: tokens over pointers to rows, by native code that reads every weight once, where it lies.

    all pairs of the layer, ascending by expert -> ask for cold rows -> hot experts, one call -> cold ones as they arrive
    -> the pairs' outputs, weighted and added in their order

Products and sums are float32, inner values are rounded to the tokens' type, and so is the result, once. An output has one
order of adding, whoever computes it: it depends neither on where a row lies, nor on which row came first, nor on the
number of threads, nor on the other tokens. It does depend on the path (the instructions), which a processor decides.

Many tokens per expert are a library's matrix product, as the exact kernel has them.

Shapes: T tokens, K top-k, D model dim, N pairs (token, expert).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.kernels.exact import ExpertMath, LayerBank, Tensors, exact
from hotsplit.bank.kernels.fast_library import EXPERT_FIELDS, Form, Library, parallel_function

MOST_TOKENS: Final = 16
"""That one call computes natively, whatever else holds; one pass over a weight serves as many."""
FEW_PAIRS: Final = 8
MANY_PAIRS: Final = 64
"""Per expert on average, up to which a longer call is native too: past it a library's product was faster. Many where the
instructions multiply the tokens' own type, or where libraries have none for it (float16)."""
_MOST_OUTPUT_BYTES: Final = 64 << 20
"""Of all pairs: memory that a longer call may take."""


class NativeExperts:
    """One layer's experts for the native code: their form, and the addresses of rows that were seen.

    Args:
        library: The native code.
        form: What the experts compute and how their weights are stored.
        names: By field of EXPERT_FIELDS, the row's tensor; a field without one is left out.
        dtype: Of the tokens.
    """

    def __init__(self, library: Library, *, form: Form, names: Mapping[str, str], dtype: torch.dtype) -> None:
        self.library, self.form, self.dtype = library, form, dtype
        self.reference = ctypes.byref(form)
        self.input_bytes = tuple(library.input_bytes(self.reference, second) for second in (0, 1))
        """Of one row of each projection's inputs."""
        multiplies_halves = self.input_bytes[0] < form.up.inputs * torch.float32.itemsize
        self.most_pairs = MANY_PAIRS if multiplies_halves or dtype == torch.float16 else FEW_PAIRS
        """Per expert, of a call that is longer than MOST_TOKENS."""
        self._names = tuple(names.get(field) for field in EXPERT_FIELDS)
        self._seen: dict[int, tuple[Tensors, tuple[int, ...]]] = {}

    @property
    def path(self) -> str:
        """Which instructions compute."""
        return self.library.paths[int(self.form.path)]

    def addresses(self, row: int, tensors: Tensors) -> tuple[int, ...]:
        """Where the tensors of a row lie, by EXPERT_FIELDS; 0 for none.

        Args:
            row: Its number.
            tensors: From the bank. The same mapping means the same addresses; a row may come with another one.
        """
        seen = self._seen.get(row)
        if seen is not None and seen[0] is tensors:
            return seen[1]
        found = tuple(0 if name is None else tensors[name].data_ptr() for name in self._names)
        self._seen[row] = (tensors, found)
        return found

    def forget(self) -> None:
        """Let go of the rows that were seen: their memory stays for as long as anyone holds a tensor of it."""
        self._seen.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class FastMath(ExpertMath):
    """What one layer's experts compute, for the library's products and for the native code."""

    native: NativeExperts
    """The native code's own view."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One expert's pairs: those from `first` on, in the layer's order."""

    row: int
    first: int
    count: int


def fast(
    hidden_states: torch.Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    row_ids: torch.Tensor,
    bank: LayerBank,
    math: ExpertMath,
) -> torch.Tensor:
    """One MoE layer's routed experts.

    Args:
        hidden_states: Tokens, [T, D].
        topk_ids: Expert ids, [T, K], integer.
        topk_weights: Router weights, [T, K].
        row_ids: Where those experts lie, [T, K], integer, from the route op.
        bank: The layer's rows.
        math: The layer's mathematics; a FastMath where the native code has it.

    Returns:
        Outputs, [T, D], of hidden_states' dtype.
    """
    if not (isinstance(math, FastMath) and _is_native(topk_ids, hidden_states=hidden_states, math=math)):
        return exact(hidden_states, topk_ids=topk_ids, topk_weights=topk_weights, row_ids=row_ids, bank=bank, math=math)
    order, runs = _runs(topk_ids, row_ids=row_ids, num_experts=math.num_experts)
    step = _Step(hidden_states, order=order, native=math.native)
    cold = {run.row: run for run in runs if not bank.is_hot(run.row)}
    bank.ask(list(cold))
    step.compute([run for run in runs if run.row not in cold], bank=bank)
    for row in bank.arrivals(list(cold)):
        step.compute([cold[row]], bank=bank)
    return step.sum(topk_weights)


def _is_native(topk_ids: torch.Tensor, *, hidden_states: torch.Tensor, math: FastMath) -> bool:
    """Whether a call is one for the native code: by its shape alone, so that nothing depends on what was routed."""
    native, num_pairs = math.native, topk_ids.numel()
    is_worth_it = len(hidden_states) <= MOST_TOKENS or (
        num_pairs <= native.most_pairs * math.num_experts
        and num_pairs * hidden_states.shape[-1] * 4 <= _MOST_OUTPUT_BYTES
    )
    return is_worth_it and hidden_states.dtype == native.dtype


def _runs(topk_ids: torch.Tensor, *, row_ids: torch.Tensor, num_experts: int) -> tuple[list[int], list[_Run]]:
    """The pairs ascending by expert, then place, then token, as the exact kernel has them; and each expert's run of them."""
    ids, rows = topk_ids.t().flatten().tolist(), row_ids.t().flatten().tolist()
    order = [pair for pair in sorted(range(len(ids)), key=ids.__getitem__) if 0 <= ids[pair] < num_experts]
    starts = [at for at, pair in enumerate(order) if at == 0 or ids[pair] != ids[order[at - 1]]]
    ends = [*starts[1:], len(order)]
    return order, [_Run(rows[order[at]], at, end - at) for at, end in zip(starts, ends, strict=bool(starts))]


class _Step:
    """One call of the kernel: its memory, and what has been computed of it."""

    def __init__(self, hidden_states: torch.Tensor, *, order: list[int], native: NativeExperts) -> None:
        self._num_tokens, self._hidden_dim = hidden_states.shape
        self._native, self._order = native, order
        self._tokens_N = np.array([pair % self._num_tokens for pair in order], dtype=np.int64)
        up_bytes, down_bytes = native.input_bytes
        self._inputs = np.empty(self._num_tokens * up_bytes, dtype=np.uint8)
        self._inner = np.empty(len(order) * down_bytes, dtype=np.uint8)
        self._outputs = np.empty(len(order) * self._hidden_dim, dtype=np.float32)
        hidden_states = hidden_states.contiguous()
        native.library.tokens(native.reference, hidden_states.data_ptr(), self._num_tokens, self._inputs.ctypes.data)

    def compute(self, runs: Iterable[_Run], *, bank: LayerBank) -> None:
        """Some experts, whose rows are there."""
        native = self._native
        held = [bank.tensors(run.row) for run in runs]  # until the call is done
        if not held:
            return
        experts = np.array(
            [
                (*native.addresses(run.row, tensors), run.first, run.count)
                for run, tensors in zip(runs, held, strict=True)
            ],
            dtype=np.int64,
        )
        native.library.compute(
            native.reference,
            experts.ctypes.data,
            len(experts),
            self._tokens_N.ctypes.data,
            self._inputs.ctypes.data,
            self._inner.ctypes.data,
            self._outputs.ctypes.data,
            torch.get_num_threads(),
            parallel_function(),
        )

    def sum(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """The pairs' outputs, weighted and added in their order, [T, D]."""
        native = self._native
        weights_N: npt.NDArray[np.float32] = topk_weights.t().reshape(-1).float().numpy()[self._order]
        sums = torch.empty(self._num_tokens, self._hidden_dim, dtype=torch.float32)
        native.library.sum(
            native.reference,
            len(self._order),
            self._tokens_N.ctypes.data,
            weights_N.ctypes.data,
            self._outputs.ctypes.data,
            self._num_tokens,
            sums.data_ptr(),
        )
        return sums.to(native.dtype)
