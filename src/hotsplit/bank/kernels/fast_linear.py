"""Linear layers of the dense part by the fast kernel's native code, for a few tokens at a time.

The same products as the experts': float32 sums in one order, whoever computes them and beside whichever tokens, rounded
once to the tokens' type. Weights are read where they lie at the time of the call; modules, parameters and state_dict stay
what they were.

Shapes: T tokens, C inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from hotsplit.bank.kernels.fast_bound import linear_and_bound
from hotsplit.bank.kernels.fast_library import KINDS, Form, Library, Matrix, parallel_function
from hotsplit.bank.kernels.plain_calls import is_its_bytes, only_computes

MOST_ROWS: Final = 16
"""Tokens that are computed natively; more are torch's."""
_PROVEN_OUTPUTS: Final = 1024
"""Of a layer, spread over all of it: in float64 the last projection of a large model would take gigabytes."""

_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)
"""A subclass may have its numbers elsewhere."""


class NativeLinear:
    """The product of one shape and type.

    Args:
        library: The native code.
        outputs: O.
        inputs: C.
        dtype: Of weights and biases: one of KINDS.
        token_dtype: Of tokens and outputs, where it is another one.
        path: Of the library's paths; None for the best.
    """

    def __init__(
        self,
        library: Library,
        *,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        token_dtype: torch.dtype | None = None,
        path: str | None = None,
    ) -> None:
        kind, token_kind = (KINDS.index(str(one).removeprefix("torch.")) for one in (dtype, token_dtype or dtype))
        matrix = Matrix(outputs=outputs, inputs=inputs, kind=kind, bias_kind=kind)
        index = len(library.paths) - 1 if path is None else library.paths.index(path)
        self._library, self._form = library, Form(up=matrix, down=matrix, token_kind=token_kind, path=index)
        self._reference = ctypes.byref(self._form)
        self._outputs, self._inputs = outputs, inputs
        self._dtype, self._weight_dtype = token_dtype or dtype, dtype
        self._row_bytes = library.input_bytes(self._reference, 0)
        self._is_direct = self._row_bytes == inputs * self._dtype.itemsize

    def takes(self, tokens: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether this call is one for the native code.

        Args:
            tokens: [..., C].
            weight: As it is now: a model may have been cast, moved, cut or quantized since it was loaded.
            bias: The same; None for none.
        """
        return (
            only_computes(tokens, weight, bias)
            and 0 < tokens.numel() <= MOST_ROWS * self._inputs
            and type(tokens) is torch.Tensor
            and tokens.dtype == self._dtype
            and is_its_bytes(tokens)
            and tokens.shape[-1:] == (self._inputs,)
            and self._reads(weight, shape=(self._outputs, self._inputs))
            and (bias is None or self._reads(bias, shape=(self._outputs,)))
        )

    def _reads(self, values: torch.Tensor, *, shape: tuple[int, ...]) -> bool:
        """Whether values lie as the native code reads them: it looks at nothing but an address."""
        return (
            type(values) in _PLAIN
            and values.shape == shape
            and values.dtype == self._weight_dtype
            and is_its_bytes(values)
            and values.is_contiguous()
        )

    def __call__(self, tokens: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One product.

        Args:
            tokens: [..., C].
            weight: [O, C].
            bias: [O]; None for none.

        Returns:
            [..., O], of the tokens' type.
        """
        tokens = tokens.contiguous()
        num_rows = tokens.numel() // self._inputs
        out = torch.empty((*tokens.shape[:-1], self._outputs), dtype=self._dtype, device="cpu")
        inputs = tokens
        if not self._is_direct:
            inputs = torch.empty(num_rows * self._row_bytes, dtype=torch.uint8, device="cpu")
            self._library.tokens(self._reference, tokens.data_ptr(), num_rows, inputs.data_ptr())
        self._library.linear(
            self._reference,
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            inputs.data_ptr(),
            num_rows,
            out.data_ptr(),
            torch.get_num_threads(),
            parallel_function(),
        )
        return out

    def share_of_bound(self, *, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
        """How much of what rounding explains the product's errors take, on random tokens against float64.

        Args:
            weight: [O, C].
            bias: [O]; None for none.

        Returns:
            The largest share: below 1 where the native code computes what it should, inf where it gives no number.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(MOST_ROWS, self._inputs, generator=generator, dtype=torch.float32).to(self._dtype)
        chosen = torch.linspace(0, self._outputs - 1, min(self._outputs, _PROVEN_OUTPUTS)).long()
        some = None if bias is None else bias[chosen].double()
        truth, bound = linear_and_bound(tokens.double(), weight=weight[chosen].double(), bias=some, dtype=self._dtype)
        shares = [
            ((self(tokens[:n], weight=weight, bias=bias)[:, chosen].double() - truth[:n]).abs() / bound[:n])
            for n in (1, MOST_ROWS)
        ]
        return float(torch.cat(shares).nan_to_num(nan=float("inf")).max())
