"""What vLLM will take of a GPU beside weights, told from its configuration before anything runs there.

Two figures of the default budget. vLLM finds both out by running a step, but experts are placed before the model is
loaded, so here they are worked out from shapes:

    KV cache       of one request of the greatest length, without which vLLM does not start
    activations    two workspaces of the expert kernels, a few copies of the hidden states, and the logits

Neither is exact. Layers that keep no keys for every token (sliding windows, state-space layers) are counted as if they
did, and a kernel may want other workspaces. What is exact is looked at once vLLM has profiled, and after warm-up
(room.py): then the budget that would have fitted is named.

Worked example, a step of 8192 tokens, 8 experts each, D = F = 7168 (w13 gives 2F), bfloat16, and no logits:

    >>> Activations(num_tokens=8192, top_k=8, hidden=7168, intermediate=7168).num_bytes / 2**30
    3.0625

Source: workspace shapes as those of vLLM 0.32's Triton experts (Apache-2.0), the rule alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_HIDDEN_COPIES: Final = 4
"""Of the hidden states of all tokens: residual, input, and what a kernel makes beside its workspaces."""
_LOGIT_BYTES: Final = 8
"""Per request and word: float32 logits, and as much again while tokens are chosen."""
_ONE_BYTE: Final = ("fp8", "int8")
"""In names of KV-cache types of one byte; smaller ones are counted as one byte too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """What vLLM keeps of every token, on one rank."""

    num_layers: int
    """Decoder layers of the rank."""
    num_heads: int
    """Of keys, and of values."""
    head_dim: int
    """Elements of a head; of latent attention, all that is kept."""
    element_bytes: int
    """Of the cache."""
    is_latent: bool = False
    """Whether keys and values are one vector (MLA)."""

    @property
    def token_bytes(self) -> int:
        """Of one token."""
        vectors = 1 if self.is_latent else 2 * self.num_heads
        return self.num_layers * vectors * self.head_dim * self.element_bytes


def request_bytes(shape: KvShape, *, num_tokens: int, block_tokens: int = 16) -> int:
    """KV cache of one request.

    Args:
        shape: Of the cache.
        num_tokens: Of the request.
        block_tokens: Of a block; the last one is whole, and vLLM keeps one back.

    >>> request_bytes(KvShape(num_layers=2, num_heads=4, head_dim=64, element_bytes=2), num_tokens=17)
    98304
    """
    return (-(-num_tokens // block_tokens) + 1) * block_tokens * shape.token_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What a step is made of."""

    num_tokens: int
    """The most in one step."""
    top_k: int
    """Experts per token."""
    hidden: int
    """Model dim, D."""
    intermediate: int
    """Expert hidden dim on this rank, F."""
    element_bytes: int = 2
    """Of the model's dtype."""
    num_requests: int = 0
    """That are given a next token in one step."""
    vocabulary: int = 0
    """Words that have a logit on every rank."""

    @property
    def num_bytes(self) -> int:
        """At the peak of a step, about."""
        pairs = self.num_tokens * self.top_k
        workspaces = pairs * (max(self.intermediate, self.hidden) + max(2 * self.intermediate, self.hidden))
        copies = _HIDDEN_COPIES * self.num_tokens * self.hidden
        return (workspaces + copies) * self.element_bytes + self.num_requests * self.vocabulary * _LOGIT_BYTES


def kv_shape(vllm_config: Any) -> KvShape:
    """The shape of the KV cache, as vLLM's configuration tells it.

    Args:
        vllm_config: vLLM's configuration.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kind = str(vllm_config.cache_config.cache_dtype)
    is_small = any(name in kind for name in _ONE_BYTE) or kind not in ("auto", "float16", "bfloat16", "half", "float32")
    return KvShape(
        num_layers=model.get_num_layers(parallel),
        num_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        element_bytes=1 if is_small else model.dtype.itemsize,
        is_latent=bool(model.use_mla),
    )


def activations(vllm_config: Any, *, top_k: int, tp: int) -> Activations:
    """What a step is made of, as vLLM's configuration tells it.

    Args:
        vllm_config: vLLM's configuration.
        top_k: Experts per token.
        tp: Tensor-parallel size.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    text = model.hf_text_config
    num_tokens = int(scheduler.max_num_batched_tokens)
    intermediate = _size(text, "moe_intermediate_size") or _size(text, "intermediate_size")
    return Activations(
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=_size(text, "hidden_size"),
        intermediate=-(-intermediate // tp),
        element_bytes=model.dtype.itemsize,
        num_requests=min(int(scheduler.max_num_seqs), num_tokens),
        vocabulary=_size(text, "vocab_size"),
    )


def _size(config: Any, name: str) -> int:
    """A size of the model; 0 where its configuration has none, or one for every layer."""
    found = getattr(config, name, None)
    return found if isinstance(found, int) else 0
