"""The proof at start that rows may move: two of them change places, and not a bit of the output changes.

This, not a list, decides which quantisation methods are supported: one that packs across rows, or binds rows to
experts somewhere, fails it and is refused by name.

    bytes moved, map not    the output must differ (or the test could see nothing)
    map moved as well       equal to the bit
    both moved back         equal to the bit

Shapes: T tokens, K top-k, D model dim, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.rows import LayerRows
from hotsplit.errors import UnsupportedEngineError

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
        kind = (type(module), type(module.quant_method), memory.row_bytes(layer_id), len(rows.row_map))
        if kind not in self._proven and len(rows.row_map) > 1:
            _prove(module, memory=memory, layer_id=layer_id, rows=rows)
            self._proven.add(kind)


def _prove(module: Any, *, memory: RangeRows, layer_id: int, rows: LayerRows) -> None:
    a, b = _two_rows(rows)
    forward = _forward(module, rows=rows)
    before = forward({})
    memory.exchange(layer_id, a, b)
    unmapped, mapped = forward({}), forward({a: b, b: a})
    memory.exchange(layer_id, a, b)
    after = forward({})
    method = type(module.quant_method).__name__
    if not torch.equal(before, mapped) or not torch.equal(before, after):
        raise _refused(method, got="an output that changed when two rows of one layer changed places")
    if torch.equal(before, unmapped):
        raise _refused(method, got="an output that does not depend on the rows that were moved")


def _two_rows(rows: LayerRows) -> tuple[int, int]:
    """The first hot and the last cold row, or the ends where there is but one kind."""
    ordered = sorted(rows.row_map)
    return ordered[0], ordered[-1]


def _forward(module: Any, *, rows: LayerRows) -> Any:
    """The layer on fixed tokens, as a function of which rows stand in for which; every expert is chosen."""
    num_experts, top_k = len(rows.row_map), module.top_k
    generator = torch.Generator().manual_seed(_SEED)
    num_tokens = max(_NUM_TOKENS, -(-num_experts // top_k))
    device = next(module.parameters()).device
    # dtypes by name: post-processing runs with the model's dtype as the default one.
    x_TD = torch.randn(num_tokens, module.hidden_size, generator=generator, dtype=torch.float32)
    x_TD = x_TD.to(device=device, dtype=module.moe_config.in_dtype)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float32).to(device) + 0.5
    ids_TK = (torch.arange(num_tokens)[:, None] * top_k + torch.arange(top_k)) % num_experts
    dtype = module.quant_method.topk_indices_dtype or torch.int32

    def forward(moved: dict[int, int]) -> torch.Tensor:
        row_of = torch.tensor([moved.get(row, row) for row in rows.row_map], dtype=dtype)
        output: torch.Tensor = module.forward_rows(x_TD.clone(), weights_TK, row_of[ids_TK].to(device))
        return output.clone()

    return forward


def _refused(method: str, *, got: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"quantisation method {method}",
        got=got,
        wanted="experts that may lie in any row",
        do="use another quantisation or --moe-backend, or unset the HOTSPLIT_ variables to run stock vLLM",
    )
