"""Which calls native code can answer: those of which nothing but numbers is wanted, over tensors that are their bytes.

Native code reads an address and writes another one. A gradient, a graph or a cast that torch would have added on the way is
torch's to add, so that such a call is torch's altogether.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def only_computes(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but the numbers of a call is wanted.

    Args:
        tensors: That go in.
    """
    return (
        not torch.compiler.is_compiling()  # first: a compiler cannot follow all of the others
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
        and not torch.is_autocast_enabled("cpu")
        # A traced graph would have the numbers of this one call.
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU is what lies at its address: torch has some that are to be negated, or are nowhere.

    Args:
        tensor: Of any strides.
    """
    return tensor.is_cpu and not tensor.is_neg() and not tensor._is_zerotensor()
