"""Rows as vLLM's CPU kernels want them: wider than the checkpoint's, where the intermediate size is no multiple of 32.

Asked before the plan is made, so that it is made of rows that really fit. Once the rows are there they are weighed again
(plan/stage.py, revalidate), so a wrong guess here is an error there and never a budget that is exceeded in silence.

Source: vLLM 0.32, layers/fused_moe/experts/cpu_moe.py (Apache-2.0), the rule alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotsplit.plan.sizes import ExpertSizes

CPU_MULTIPLE = 32
"""Elements that the CPU kernels want the intermediate size of an expert, on one rank, to be a multiple of."""
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
