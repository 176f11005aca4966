"""The probe around one layer: in front of hotsplit, where ids are experts, and behind it, where they are rows.

    router -> forward() -> hotsplit's forward_modular -> kernel() -> vLLM's kernel

Shapes: E experts, T tokens, P padding tokens, K top-k, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from hotsplit_probe import live
from hotsplit_probe.copies import Copy, same_bits


class LayerProbe:
    """Stands around one layer from its construction on.

    Args:
        layer: The experts module.
        layer_id: Ordinal among MoE layers.
        watch: What is told, and what is to be done.
    """

    def __init__(self, layer: Any, *, layer_id: int, watch: Any) -> None:
        self._layer_id, self._watch = layer_id, watch
        self._forward, self._apply = layer.forward_modular, layer.quant_method.apply
        self.copy = Copy(layer, apply=self._apply, row_map_E=live.row_map(layer_id))
        layer.forward_modular = self.forward
        object.__setattr__(layer.quant_method, "apply", self.kernel)  # it may be a module

    def forward(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        """One MoE call: count what the router chose, run hotsplit, and now and then compute the same without it.

        Args:
            x: Hidden states, [T, D].
            topk_weights: Router weights, [T, K].
            topk_ids: Expert ids, [T, K].
            *args: Shared experts.
            **kw: The same by name.
        """
        watch = self._watch
        watch.count(self._layer_id, topk_ids)
        inputs = (x, topk_weights, topk_ids)
        wanted = self.copy.compute(*(each.clone() for each in inputs)) if watch.is_due() else None
        if watch.padding:
            inputs = padded(*inputs, num_padding=watch.padding, num_experts=watch.num_experts)
            watch.found["padding_tokens"] += watch.padding
        result = self._forward(*inputs, *args, **kw)[: len(x)]
        if wanted is not None:
            watch.found["compared"] += 1
            watch.found["mismatches"] += not same_bits(wanted, result)
        return result

    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        """What hotsplit hands to the kernel: rows.

        Args:
            *args: vLLM's.
            **kwargs: vLLM's; topk_ids are row ids, [T + P, K].
        """
        watch = self._watch
        rows = kwargs["topk_ids"]
        if watch.padding:
            real, padding = (set(part.ravel().tolist()) for part in (rows[: -watch.padding], rows[-watch.padding :]))
            watch.found["padding_rows_of_its_own"] += len(padding - real)
        if watch.is_rolled:
            row_map_E = live.row_map(self._layer_id)
            wrong_R = torch.zeros(int(row_map_E.max()) + 1, dtype=rows.dtype)
            wrong_R[row_map_E] = row_map_E.roll(1).to(rows.dtype)
            kwargs["topk_ids"] = wrong_R[rows.long()]
        return self._apply(*args, **kwargs)


def padded(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, num_padding: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padding as a captured graph makes it: tokens of noise that route anywhere, and a mask that says so.

    vLLM's CPU build never pads; the mask goes where vLLM puts its own.

    Args:
        x: Hidden states, [T, D].
        topk_weights: Router weights, [T, K].
        topk_ids: Expert ids, [T, K].
        num_padding: P.
        num_experts: E.

    Returns:
        The same with P tokens behind them.
    """
    num_tokens, top_k = topk_ids.shape
    context = get_forward_context()
    if context.is_padding is None or len(context.is_padding) != num_tokens + num_padding:
        context.is_padding = torch.arange(num_tokens + num_padding) >= num_tokens
    noise = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_padding, x.shape[1], generator=noise, dtype=torch.float32)
    weights = torch.rand(num_padding, top_k, generator=noise, dtype=torch.float32)
    ids = torch.randint(num_experts, (num_padding, top_k), generator=noise)
    parts = ((x, hidden), (topk_weights, weights), (topk_ids, ids))
    real_x, real_weights, real_ids = (torch.cat([real, more.to(real.dtype)]) for real, more in parts)
    return real_x, real_weights, real_ids
