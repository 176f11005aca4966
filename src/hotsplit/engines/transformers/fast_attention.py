"""The fast kernel in a model's attention: transformers calls the function that is registered under NAME.

Where a model would use "sdpa" its configuration gets that name instead, for as long as the model is open. A call of a few
query tokens is native; every other one is transformers' own sdpa, with the arguments that came.

The name is in no file, copy or pickle: there it is "sdpa" again.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast_attention import MOST_QUERIES, Attention, Heads, NativeAttention
from hotsplit.notices import Notice

logger = logging.getLogger(__name__)

_STOCK: Final = "sdpa"
_UNDERSTOOD: Final = frozenset(
    {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
)
"""Arguments of transformers' own function that the native code has, `dropout` while it is 0, and all those that it ignores."""
_LOOKED_FOR: Final = frozenset({"softcap", "output_attentions"})
"""What it looks for among those it ignores."""
_ASKS_FOR_NAME: Final = re.compile(r"""(?<!: str = )["']sdpa["']""")
"""In a model's code: it does something for the implementation of that name, beyond calling it. A default is no question."""


class _Name(str):
    """Of an attention implementation; a copy, or what a pickle brings back, is the stock one's."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """What a copy or pickle is made of.

        Args:
            protocol: Of the pickle.
        """
        return str, (_STOCK,)


NAME: Final = _Name("hotsplit_sdpa")
"""Of our attention implementation."""


def register() -> None:
    """Make the implementation known to transformers, with the masks of "sdpa"; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer (what transformers calls an attention implementation).

    Args:
        module: The attention module.
        query: [B, H, T, K].
        key: [B, G, S, K].
        value: [B, G, S, V].
        attention_mask: [B, 1 or H, T, S]; None where there is nothing to hide.
        **kwargs: As for "sdpa".

    Returns:
        [B, T, H, V], and no weights.
    """
    # Asked first: what a compiled graph has of this function is sdpa.
    if torch.compiler.is_compiling() or query.ndim != 4 or query.shape[2] > MOST_QUERIES or not _is_at_rest(kwargs):
        output = None
    else:
        call = Attention(
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            scale=_scale(kwargs, key_dim=query.shape[3]),
            is_causal=attention_mask is None and query.shape[2] > 1 and _is_causal(module, kwargs),
        )
        output = _native(call, group=getattr(module, "num_key_value_groups", 1))
    if output is not None:
        return output, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[torch.Tensor, torch.Tensor | None]
    found = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return found


@dataclass(kw_only=True, slots=True)
class FastAttention:
    """What was changed in a model, and what must be said about it."""

    configs: list[Any] = field(default_factory=list)
    """That have our name."""
    notices: list[Notice] = field(default_factory=list)
    """What stays torch's."""

    def close(self) -> None:
        """Give every configuration its name back; twice is harmless."""
        for config in self.configs:
            if config._attn_implementation == NAME:  # else somebody has chosen another since
                _choose(config, _STOCK)
        self.configs = []


def use_native_attention(model: Any) -> FastAttention:
    """Have a model's attention computed natively for a few tokens, where it would be transformers' sdpa.

    Args:
        model: On the CPU.
    """
    register()
    attention = FastAttention()
    for config, modules in _configs(model):
        unfit = sorted({type(module).__name__ for module in modules if not _only_calls(type(module).__module__)})
        if not unfit:
            _choose(config, NAME)
            attention.configs.append(config)
        else:
            text = f"attention stays torch's: the code of {unfit[0]} asks for the name of its implementation"
            attention.notices.append(Notice(name="exact-instead", text=text, strict=False))
    return attention


def _configs(model: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Configurations that have chosen sdpa, each with all modules that read it."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if getattr(config, "_attn_implementation", None) == _STOCK:
            found.setdefault(id(config), (config, []))[1].append(module)
    yield from found.values()


def _choose(config: Any, name: str) -> None:
    """One configuration's implementation, but not that of those inside it."""
    config._attn_implementation = {"": name}


@functools.cache
def _only_calls(module_name: str) -> bool:
    """Whether a model's code does nothing with the name but to look up the function."""
    try:
        code = inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return False
    return _ASKS_FOR_NAME.search(code) is None


@functools.cache
def _others() -> frozenset[str]:
    """Arguments that have an effect in transformers' own function which the native code does not have."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return (frozenset(inspect.signature(sdpa_attention_forward).parameters) - _UNDERSTOOD) | _LOOKED_FOR


def _is_at_rest(kwargs: dict[str, Any]) -> bool:
    """Whether every argument that sdpa would not ignore has no effect."""
    if kwargs.get("dropout"):
        return False
    return all(kwargs.get(name) is None or kwargs[name] is False for name in _others())


def _scale(kwargs: dict[str, Any], *, key_dim: int) -> float:
    scaling = kwargs.get("scaling")
    return float(key_dim**-0.5 if scaling is None else scaling)


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether sdpa would hide what comes later, where there is no mask and more than one token."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _native(call: Attention, *, group: int) -> torch.Tensor | None:
    """The attention of a call; None where it is sdpa's."""
    native = _kernel()
    if native is None or not native.takes(call):
        return None
    (_, heads, tokens, key_dim), (_, key_heads, keys, value_dim) = call.query.shape, call.value.shape
    # Where there are more keys than tokens, sdpa cuts them; where heads do not share as the module says, it refuses.
    if (call.is_causal and tokens != keys) or heads != key_heads * group:
        return None
    form = Heads(group=group, key_dim=key_dim, value_dim=value_dim, dtype=call.query.dtype)
    return native(call) if _is_proven(form) else None


@functools.cache
def _kernel() -> NativeAttention | None:
    library = fast_library.load()
    return None if library is None else NativeAttention(library)


@functools.cache
def _is_proven(form: Heads) -> bool:
    """Whether native results of a form are right on random numbers, which is tried once."""
    native = _kernel()
    share = float("inf") if native is None else native.share_of_bound(form)
    if share < 1:  # not NaN either
        return True
    what = f"attention of {form.dtype}, {form.group} heads on keys of {form.key_dim} and values of {form.value_dim},"
    text = f"{what} stays torch's: native results differ by {share:.3g} times what rounding explains"
    logger.warning("%s", Notice(name="exact-instead", text=text, strict=False))
    return False
