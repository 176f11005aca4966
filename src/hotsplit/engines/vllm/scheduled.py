"""What vLLM says of the step that it runs: its phase, and which of its tokens nobody asked for."""

from __future__ import annotations

from typing import Any

import torch

from hotsplit.bank.route import Phase


def phase_of(scheduler_output: Any) -> Phase:
    """Decode, unless a request computes more than one token and those drafted for it.

    Args:
        scheduler_output: vLLM's.
    """
    drafted = scheduler_output.scheduled_spec_decode_tokens
    for request, num_tokens in scheduler_output.num_scheduled_tokens.items():
        if num_tokens > 1 + len(drafted.get(request, ())):
            return "prefill"
    return "decode"


def padding_mask() -> torch.Tensor | None:
    """The engine's own mask, [T], bool, of the forward under way."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context().is_padding if is_forward_context_available() else None
