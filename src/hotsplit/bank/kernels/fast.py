"""The fast kernel: tokens over pointers to rows, by native code that reads every weight once, where it lies.

    begin   all pairs of the layer, ascending by expert      hot    hot experts, in one call, while cold rows are read
    ask     for the cold rows among theirs                   cold   each as it arrives
                                                             end    the pairs' outputs, weighted and added in their order

Products and sums are float32, inner values are rounded to the tokens' type, and so is the result, once. An output has one
order of adding, whoever computes it: it depends neither on where a row lies, nor on which row came first, nor on the
number of threads, nor on the other tokens. It does depend on the path (the instructions), which a processor decides.

Many tokens per expert are a library's matrix product, as the exact kernel has them.

Shapes: T tokens, K top-k, D model dim, E experts, R hot rows, A addresses of one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hotsplit.bank.kernels.exact import ExpertMath, LayerBank, Tensors, exact
from hotsplit.bank.kernels.fast_library import EXPERT_FIELDS, KINDS, Form, LayerCall, Library, parallel_function
from hotsplit.bank.kernels.plain_calls import is_its_bytes, only_computes

MOST_TOKENS: Final = 16
"""That one call computes natively, whatever else holds; one pass over a weight serves as many."""
FEW_PAIRS: Final = 8
MANY_PAIRS: Final = 64
"""Per expert on average, up to which a longer call is native too: past it a library's product was faster. Many where the
instructions multiply the tokens' own type, or where libraries have none for it (float16)."""
_MOST_OUTPUT_BYTES: Final = 64 << 20
"""Of all pairs: memory that a longer call may take."""
_KINDS: Final = {getattr(torch, name): kind for kind, name in enumerate(KINDS[:3])}
"""Of router weights."""
_LINE: Final = 64

_Addresses = ctypes.c_void_p * len(EXPERT_FIELDS)


class NativeExperts:
    """One layer's experts for the native code: their form, and the addresses of rows that were seen.

    One bank is served until forget(): a hot row stays where it is.

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
        self._hot_RA = np.zeros((0, len(EXPERT_FIELDS)), dtype=np.int64)
        self._held: dict[int, Tensors] = {}
        self._cold: dict[int, tuple[Tensors, ctypes.Array[ctypes.c_void_p]]] = {}
        self._scratch_bytes: dict[tuple[int, int, int], int] = {}

    @property
    def path(self) -> str:
        """Which instructions compute."""
        return self.library.paths[int(self.form.path)]

    def hot_addresses(self, num_rows: int) -> int:
        """Where the addresses of hot rows lie: a table of EXPERT_FIELDS by row, 0 in a row that was not learned yet.

        Args:
            num_rows: Of them.
        """
        if len(self._hot_RA) != num_rows:
            self._hot_RA = np.zeros((num_rows, len(EXPERT_FIELDS)), dtype=np.int64)
        return int(self._hot_RA.ctypes.data)

    @property
    def seen(self) -> tuple[object, object]:
        """That table and the rows in it: whoever keeps both keeps their memory, whatever forget() does meanwhile."""
        return self._hot_RA, self._held

    def learn(self, rows: Iterable[int], *, bank: LayerBank) -> None:
        """Put rows into that table.

        Args:
            rows: Hot ones.
            bank: The layer's rows.
        """
        for row in rows:
            if not self._hot_RA[row, 0]:
                self._held[row] = bank.tensors(row)
                self._hot_RA[row] = self._addresses(self._held[row])

    def cold_addresses(self, row: int, tensors: Tensors) -> ctypes.Array[ctypes.c_void_p]:
        """Where the tensors of a cold row lie.

        Args:
            row: Its number.
            tensors: From the bank. The same mapping means the same addresses; a row may come with another one.
        """
        seen = self._cold.get(row)
        if seen is not None and seen[0] is tensors:
            return seen[1]
        found = _Addresses(*self._addresses(tensors))
        self._cold[row] = (tensors, found)
        return found

    def scratch_bytes(self, num_tokens: int, *, top_k: int, num_experts: int) -> int:
        """Memory that a call takes.

        Args:
            num_tokens: T.
            top_k: K.
            num_experts: E.
        """
        key = (num_tokens, top_k, num_experts)
        if key not in self._scratch_bytes:
            self._scratch_bytes[key] = self.library.scratch(self.reference, *key)
        return self._scratch_bytes[key]

    def forget(self) -> None:
        """Let go of the rows that were seen: their memory stays for as long as anyone holds a tensor of it."""
        self._hot_RA = self._hot_RA[:0]
        self._held, self._cold = {}, {}  # a call under way on another thread keeps what it began with

    def _addresses(self, tensors: Tensors) -> tuple[int, ...]:
        return tuple(0 if name is None else tensors[name].data_ptr() for name in self._names)


@dataclass(frozen=True, kw_only=True, slots=True)
class FastMath(ExpertMath):
    """What one layer's experts compute, for the library's products and for the native code."""

    native: NativeExperts
    """The native code's own view."""


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
    if not (
        isinstance(math, FastMath)
        and _is_native(topk_ids, topk_weights=topk_weights, hidden_states=hidden_states, math=math)
    ):
        return exact(hidden_states, topk_ids=topk_ids, topk_weights=topk_weights, row_ids=row_ids, bank=bank, math=math)
    native = math.native
    call = _Call(native, bank=bank, hidden_states=hidden_states, topk_weights=topk_weights)
    cold = call.begin(topk_ids, row_ids=row_ids, num_experts=math.num_experts)
    bank.ask(cold)
    native.library.hot(call.reference)
    numbers = {row: number for number, row in enumerate(cold)}
    for row in bank.arrivals(cold):
        tensors = bank.tensors(row)  # until the call is done
        native.library.cold(call.reference, numbers[row], native.cold_addresses(row, tensors))
    return call.end()


def _is_native(
    topk_ids: torch.Tensor, *, topk_weights: torch.Tensor, hidden_states: torch.Tensor, math: FastMath
) -> bool:
    """Whether a call is one for the native code: by its form alone, so that nothing depends on what was routed."""
    native, num_pairs = math.native, topk_ids.numel()
    is_worth_it = len(hidden_states) <= MOST_TOKENS or (
        num_pairs <= native.most_pairs * math.num_experts
        and num_pairs * hidden_states.shape[-1] * 4 <= _MOST_OUTPUT_BYTES
    )
    return (
        is_worth_it
        and hidden_states.dtype == native.dtype
        and only_computes(hidden_states, topk_weights)
        and is_its_bytes(hidden_states)
        and is_its_bytes(topk_weights)
    )


class _Call:
    """One call of the kernel: what the native code is told, and the memory behind it for as long as it lasts."""

    def __init__(
        self, native: NativeExperts, *, bank: LayerBank, hidden_states: torch.Tensor, topk_weights: torch.Tensor
    ) -> None:
        self._native, self._bank = native, bank
        self._hidden = hidden_states.contiguous()
        self._out = torch.empty(self._hidden.shape, dtype=native.dtype, device="cpu")
        weights = topk_weights.contiguous()
        kind = _KINDS.get(weights.dtype)
        self._weights, kind = (weights, kind) if kind is not None else (weights.float(), _KINDS[torch.float32])
        self._told = LayerCall(
            form=ctypes.pointer(native.form),
            hidden=self._hidden.data_ptr(),
            weights=self._weights.data_ptr(),
            weight_kind=kind,
            out=self._out.data_ptr(),
            first_cold=bank.first_cold,
            num_threads=torch.get_num_threads(),
            parallel=parallel_function() or None,
        )
        self.reference = ctypes.byref(self._told)
        """For the native code."""

    def begin(self, topk_ids: torch.Tensor, *, row_ids: torch.Tensor, num_experts: int) -> list[int]:
        """Sort the pairs; the cold rows among theirs, each once."""
        native, told = self._native, self._told
        ids, rows = topk_ids.contiguous(), row_ids.contiguous()
        ids, rows = (one if one.dtype == torch.int64 else one.long() for one in (ids, rows))
        num_tokens, top_k = ids.shape
        scratch = _scratch(
            native.scratch_bytes(num_tokens, top_k=top_k, num_experts=num_experts), is_kept=num_tokens <= MOST_TOKENS
        )
        told.ids, told.rows, told.scratch = ids.data_ptr(), rows.data_ptr(), scratch.data_ptr()
        told.num_tokens, told.top_k, told.num_experts = num_tokens, top_k, num_experts
        told.addresses = native.hot_addresses(told.first_cold)
        self._alive = ids, rows, scratch, native.seen
        native.library.begin(self.reference)
        if told.num_unknown:
            native.learn(self._runs(scratch, 0, told.num_hot), bank=self._bank)
            native.library.begin(self.reference)
        return self._runs(scratch, told.num_hot, told.num_cold) if told.num_cold else []

    def end(self) -> torch.Tensor:
        """The pairs' outputs, weighted and added in their order, [T, D]."""
        self._native.library.end(self.reference)
        return self._out

    @staticmethod
    def _runs(scratch: torch.Tensor, first: int, count: int) -> list[int]:
        """Rows that runs are of: the scratch begins with them, on a cache line."""
        lead = -scratch.data_ptr() % _LINE
        rows: list[int] = scratch[lead + 8 * first : lead + 8 * (first + count)].view(torch.int64).tolist()
        return rows


class _Scratch(threading.local):
    """The memory that a thread's calls of few tokens use again and again."""

    memory = torch.empty(0, dtype=torch.uint8, device="cpu")


_kept = _Scratch()


def _scratch(num_bytes: int, *, is_kept: bool) -> torch.Tensor:
    if not is_kept:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if len(_kept.memory) < num_bytes:
        _kept.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return _kept.memory
