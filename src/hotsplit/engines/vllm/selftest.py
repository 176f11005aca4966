"""The proof at start that rows may move: two of them change places, and not a bit of the output changes.

This, not a list, decides which quantisation methods are supported: one that packs across rows, or binds rows to
experts somewhere, fails it and is refused by name.

    bytes moved, map not    the output must differ (or the test could see nothing)
    map moved as well       equal to the bit
    both moved back         equal to the bit

**Two banks** (two_calls.py) need a kernel that honours an expert map. That is proven first, over the layer's plain
tensors: two calls must give what one gives. They need not agree to the bit, since a token's experts are summed in another
order, so each token is held against a bound:

    one pair alone    |two - one| <= (8 u + g) |one|                 about four roundings to the model's dtype in each
    all K pairs       |two - one| <= (2 (K + 4) u + g) |all pairs|   and K more in each for their sum

with u half of the dtype's epsilon, g what float32 loses over dot products of up to 4 D terms, |.| the norm over D, and
|all pairs| that of the sum of the pairs' absolute values. A wrong row errs by about its own size: many times the bound.
Then rows move: within a bank to the bit as above, between the banks within the bound.

Shapes: T tokens, K top-k, D model dim, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.rows import LayerRows
from hotsplit.engines.vllm.two_calls import no_expert_map, trial_calls
from hotsplit.errors import UnsupportedEngineError

logger = logging.getLogger(__name__)

_NUM_TOKENS = 16
_SEED = 7


class Prover:
    """Proves layers movable, one of each kind."""

    def __init__(self) -> None:
        self._proven: set[tuple[object, ...]] = set()

    def prove(self, module: Any, *, memory: RangeRows, layer_id: int, rows: LayerRows) -> None:
        """Prove a layer movable, unless one of its kind has been.

        Args:
            module: vLLM's experts module, post-processed.
            memory: Its rows.
            layer_id: Ordinal among MoE layers.
            rows: Where every expert lies.

        Raises:
            UnsupportedEngineError: The output depends on where a row lies, or on nothing that was moved.
        """
        is_apart = memory.memory.num_banks == 2 and _has_both(rows)
        kind = (type(module), type(module.quant_method), memory.row_bytes(layer_id), len(rows.row_map), is_apart)
        if kind not in self._proven and len(rows.row_map) > 1:
            trial = _Trial(module, rows=rows)
            if is_apart:
                _prove_apart(trial, memory=memory, layer_id=layer_id, rows=rows)
            else:
                ordered = sorted(rows.row_map)
                _prove_pair(trial, memory=memory, layer_id=layer_id, pair=(ordered[0], ordered[-1]))
            self._proven.add(kind)

    def prove_two_calls(self, module: Any, *, rows: LayerRows) -> None:
        """Prove that a layer's kernel can be called for each of two banks, unless one of its kind has been.

        Args:
            module: vLLM's experts module, post-processed; its plain tensors have all rows.
            rows: Where every expert lies; both banks have some.

        Raises:
            UnsupportedEngineError: Two calls give something else than one.
        """
        shapes = tuple((name, tuple(one.shape[1:]), one.dtype) for name, one in module.named_parameters(recurse=False))
        kind = (type(module), type(module.quant_method), shapes)
        if kind not in self._proven:
            _prove_calls(module, rows=rows)
            self._proven.add(kind)


class _Trial:
    """A layer on fixed tokens; every expert is chosen.

    Args:
        module: vLLM's experts module.
        rows: Where every expert lies.
    """

    def __init__(self, module: Any, *, rows: LayerRows) -> None:
        num_experts = len(rows.row_map)
        self.module, self.top_k = module, module.top_k
        self.method = type(module.quant_method).__name__
        generator = torch.Generator().manual_seed(_SEED)
        num_tokens = max(_NUM_TOKENS, -(-num_experts // self.top_k))
        self._device = next(module.parameters()).device
        # dtypes by name: post-processing runs with the model's dtype as the default one.
        x_TD = torch.randn(num_tokens, module.hidden_size, generator=generator, dtype=torch.float32)
        self._x_TD = x_TD.to(device=self._device, dtype=module.moe_config.in_dtype)
        weights_TK = torch.rand(num_tokens, self.top_k, generator=generator, dtype=torch.float32)
        self._weights_TK = weights_TK.to(self._device) + 0.5
        self._ids_TK = (torch.arange(num_tokens)[:, None] * self.top_k + torch.arange(self.top_k)) % num_experts
        self._row_map = rows.row_map

    def run(
        self, moved: Mapping[int, int] | None = None, *, only: int | None = None, calls: Any = None
    ) -> torch.Tensor:
        """The output, [T, D].

        Args:
            moved: Which rows stand in for which; None where none does.
            only: One of the K pairs, with the others' weights zero; None for all.
            calls: What computes it; None for the module.
        """
        dtype = self.module.quant_method.topk_indices_dtype or torch.int32
        row_of_E = torch.tensor([(moved or {}).get(row, row) for row in self._row_map], dtype=dtype)
        weights_TK = self._weights_TK.clone()
        if only is not None:
            weights_TK *= torch.arange(self.top_k, device=self._device) == only
        forward = calls or self.module.forward_rows
        output: torch.Tensor = forward(self._x_TD.clone(), weights_TK, row_of_E[self._ids_TK].to(self._device))
        return output.clone()

    def pairs(self, *, calls: Any = None) -> list[torch.Tensor]:
        """The output of each of a token's K pairs alone, [T, D]."""
        return [self.run(only=k, calls=calls) for k in range(self.top_k)]

    def bound(self, num_roundings: int) -> float:
        """How far two right results may be apart, in parts of their size."""
        ours, single = (float(torch.finfo(dtype).eps) / 2 for dtype in (self._x_TD.dtype, torch.float32))
        return num_roundings * ours + 4 * int(self.module.hidden_size) * single


def _prove_pair(trial: _Trial, *, memory: RangeRows, layer_id: int, pair: tuple[int, int]) -> None:
    """Two rows change places, and not a bit of the output changes."""
    a, b = pair
    before = trial.run()
    memory.exchange(layer_id, a, b)
    unmapped, mapped = trial.run(), trial.run({a: b, b: a})
    memory.exchange(layer_id, a, b)
    after = trial.run()
    if not torch.equal(before, mapped) or not torch.equal(before, after):
        raise _refused(trial.method, got="an output that changed when two rows of one layer changed places")
    if torch.equal(before, unmapped):
        raise _refused(trial.method, got="an output that does not depend on the rows that were moved")


def _prove_apart(trial: _Trial, *, memory: RangeRows, layer_id: int, rows: LayerRows) -> None:
    """The same within each bank, and between them within the bound."""
    banks = [[row for row in sorted(rows.row_map) if (row >= rows.first_cold) == is_cold] for is_cold in (False, True)]
    for bank in banks:
        if len(bank) > 1:
            _prove_pair(trial, memory=memory, layer_id=layer_id, pair=(bank[0], bank[-1]))
    a, b = banks[0][0], banks[1][-1]
    before, scale_TD, bound = trial.run(), _sizes(trial.pairs()), trial.bound(2 * (trial.top_k + 4))
    memory.exchange(layer_id, a, b)
    unmapped, mapped = trial.run(), trial.run({a: b, b: a})
    memory.exchange(layer_id, a, b)
    if _farthest(before, mapped, scale=scale_TD) > bound or not torch.equal(before, trial.run()):
        raise _refused(trial.method, got="an output that changed when a row of each bank changed places")
    if _farthest(before, unmapped, scale=scale_TD) <= bound:
        raise _refused(trial.method, got="an output that does not depend on the rows that were moved")


def _prove_calls(module: Any, *, rows: LayerRows) -> None:
    """Two calls over plain tensors give what one gives; either of them alone does not."""
    trial = _Trial(module, rows=rows)
    one, pairs = trial.run(), trial.pairs()
    try:
        calls = trial_calls(module, rows=rows)
        two, pairs_two = trial.run(calls=calls), trial.pairs(calls=calls)
        # Where a bank has no routed expert, the other one's call gives all there is to see.
        halves = [trial.run(calls=view.forward_rows) for view in calls.views if _has_both(rows)]
    except Exception as error:  # whatever a kernel thinks of an expert map
        raise no_expert_map(module, got=f"{type(error).__name__}: {error}") from error
    scale_TD, bound = _sizes(pairs), trial.bound(2 * (trial.top_k + 4))
    apart = [_farthest(a, b, scale=a) / trial.bound(8) for a, b in zip(pairs, pairs_two, strict=True)]
    apart.append(_farthest(one, two, scale=scale_TD) / bound)
    if not max(apart) <= 1:
        raise no_expert_map(
            module, got=f"two calls that differ from one by {max(apart):.3g} times what rounding can do"
        )
    if any(_farthest(one, half, scale=scale_TD) <= bound for half in halves):
        raise no_expert_map(module, got="an output that does not depend on the rows of one bank")
    logger.info(
        "hotsplit: %s is called once for each bank; two calls differ from one by %.3g of what rounding can do, and are "
        "not equal to the bit",
        trial.method,
        max(apart),
    )


def _has_both(rows: LayerRows) -> bool:
    """Whether routed experts lie in both banks."""
    return min(rows.row_map) < rows.first_cold <= max(rows.row_map)


def _sizes(pairs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of absolute values, [T, D]."""
    total_TD = torch.zeros_like(pairs[0], dtype=torch.float32)
    for one in pairs:
        total_TD += one.float().abs()
    return total_TD


def _farthest(a: torch.Tensor, b: torch.Tensor, *, scale: torch.Tensor) -> float:
    """The largest distance of a token, in parts of its scale; infinite where it is no number.

    Args:
        a: [T, D].
        b: [T, D].
        scale: [T, D].
    """
    distance_T, scale_T = (a.float() - b.float()).norm(dim=1), scale.float().norm(dim=1)
    ratio_T = torch.where(distance_T == 0, 0.0, distance_T / scale_T)
    return float(ratio_T.nan_to_num(nan=torch.inf).max())


def _refused(method: str, *, got: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"quantisation method {method}",
        got=got,
        wanted="experts that may lie in any row",
        do="use another quantisation or --moe-backend, or unset the HOTSPLIT_ variables to run stock vLLM",
    )
