"""What rows take beyond the checkpoint's bytes: padding on a CPU, page edges and small tensors on a GPU.

    as_padded    vLLM's CPU kernels want rows whose intermediate size is a multiple of 32
    with_pages   a GPU's memory comes in pages, and tensors too small to be split stay there for all experts

Asked before the plan is made, so that it is made of rows that really fit. Once the rows are there they are weighed again
(plan/stage.py, revalidate), so a wrong guess here is an error there and never a budget that is exceeded in silence.

Source: vLLM 0.32, layers/fused_moe/experts/cpu_moe.py (Apache-2.0), the rule alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hotsplit.engines.vllm.budget import Parameter
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import MIB

CPU_MULTIPLE = 32
"""Elements that the CPU kernels want the intermediate size of an expert, on one rank, to be a multiple of."""
GPU_PAGE_BYTES: Final = 2 * MIB
"""What GPU memory behind address ranges comes in, on every driver so far. Each driver is asked again when ranges are
made (bank/cuda_ranges.py)."""
_GPU_ALIGNMENT: Final = 256
"""Bytes that a row must be a multiple of to be split there."""
_UNPADDED_ACTIVATIONS = frozenset({"gpt_oss"})
"""Model types whose gate and up values are interleaved: the kernels do not pad those."""


def as_padded(sizes: ExpertSizes, *, vllm_config: Any) -> ExpertSizes:
    """The sizes with the padding that vLLM will add.

    Args:
        sizes: From the checkpoint's headers, for this tensor-parallel size.
        vllm_config: vLLM's configuration.
    """
    text = vllm_config.model_config.hf_text_config
    intermediate = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    is_plain = getattr(text, "model_type", None) not in _UNPADDED_ACTIVATIONS and sizes.quantisation is None
    if not isinstance(intermediate, int) or not is_plain:
        return sizes
    return replace(sizes, row_bytes=padded_bytes(sizes.row_bytes, intermediate=intermediate, tp=sizes.tp))


def padded_bytes(row_bytes: Any, *, intermediate: int, tp: int) -> Any:
    """Bytes of a row whose intermediate size is padded; both projections are proportional to it.

    Args:
        row_bytes: Unpadded, bytes or an array of them.
        intermediate: Elements, of the whole expert.
        tp: Tensor-parallel size.

    >>> padded_bytes(3 * 48 * 100 * 2, intermediate=96, tp=2)
    38400
    """
    own = -(-intermediate // tp)
    padded = -(-own // CPU_MULTIPLE) * CPU_MULTIPLE
    return row_bytes * padded // own


def with_pages(sizes: ExpertSizes, *, layers: Sequence[Sequence[Parameter]]) -> ExpertSizes:
    """The sizes with what a GPU keeps of every layer whatever is hot.

    Args:
        sizes: From the checkpoint's headers, for this tensor-parallel size.
        layers: Parameters of its MoE layers, L of them.
    """
    num_experts = sizes.identity.num_experts or 1
    fixed_L = [_fixed_bytes(layer, num_experts=num_experts) for layer in layers]
    return replace(sizes, fixed_bytes=sizes.fixed_bytes + np.array(fixed_L, dtype=np.int64))


def fixed_bytes(layers: Sequence[Sequence[Parameter]], *, sizes: ExpertSizes) -> int:
    """The most of it in some decoder layers, those without experts among them.

    Args:
        layers: Their parameters.
        sizes: Of the experts.
    """
    num_experts = sizes.identity.num_experts or 1
    return sum(_fixed_bytes(layer, num_experts=num_experts) for layer in layers)


def _fixed_bytes(layer: Sequence[Parameter], *, num_experts: int) -> int:
    """Of one layer.

    A tensor that is split wastes less than a page at its edge. One that is not, because it makes up less than one
    hundredth of an expert or its rows cannot be aligned, stays in GPU memory for all experts and the spare row.
    """
    rows = [one.num_bytes // num_experts for one in layer if one.is_expert]
    total = sum(rows)
    is_split = [row * 100 >= total and row % _GPU_ALIGNMENT == 0 for row in rows]
    kept = sum(row for row, split in zip(rows, is_split, strict=True) if not split)
    return sum(is_split) * GPU_PAGE_BYTES + kept * (num_experts + 1)
