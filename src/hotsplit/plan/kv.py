"""What a KV cache weighs on one rank, layer by layer, from config.json: read off fields, never off a model's name alone.

Beside the sizes, for `fit`: `config.json -> kinds of layers -> bytes`. Four kinds hold different things:

    full      keys and values of every token: 2 x KV heads of the rank x head dimension
    sliding   the same, of the last `window` tokens of each sequence alone
    latent    (MLA) one compressed vector and its rotary part per token, whole on every rank; sparse variants add index keys
    state     (linear attention, state-space, short convolution) a fixed number of bytes per sequence, whatever its length

A rank holds ceil(KV heads / TP) heads, and one where there are fewer heads than ranks: heads are then copied, and the
cache no longer shrinks with ranks. A layer whose kind or shape the fields do not tell is unknown, and so is the sum.

    DeepSeek-V3: 61 latent layers x (512 + 64) x 2 bytes = 70,272 bytes per token on every rank, whatever TP is

Source: the shapes of states are those that vLLM 0.32 (Apache-2.0) allocates, mamba_utils.py, and the packed form of sparse latent layers is that of its flashmla_sparse.py
(656 bytes for a rank of 512; kernels that take plain fp8 need 576); field names are those of
the configuration classes in transformers 5.23 (Apache-2.0). No code was taken. Engines round caches up to whole blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotsplit.plan.kinds import STRANGE, layer_kinds
from hotsplit.plan.layouts import language_config

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of the types that caches and states have, by the names in config.json and of --kv-dtype."""
_TWISTS = ("num_kv_shared_layers", "use_cla", "attention_k_eq_v", "global_head_dim")
"""Fields of layers that share a cache, or keep less or more than the kinds below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayer:
    """What one decoder layer keeps."""

    kind: str
    """full, sliding, latent, state, none or unknown."""
    token_bytes: int = 0
    """Per token that is kept, on one rank."""
    window: int | None = None
    """Tokens of a sequence that are kept at most; None for all."""
    state_bytes: int = 0
    """Per sequence, whatever its length, on one rank."""
    reason: str = ""
    """Why it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """What all decoder layers keep on one rank."""

    layers: tuple[KvLayer, ...]
    """In decoder order."""
    dtype: str | None
    """Element type of keys and values; None where nobody says."""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why the sums are unknown, each reason once; empty where they are known."""
        return tuple(dict.fromkeys(layer.reason for layer in self.layers if layer.kind == "unknown"))

    @property
    def kinds(self) -> dict[str, int]:
        """Number of layers of each kind."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def token_bytes(self) -> int:
        """Per token of layers that keep every token: what a longer context costs."""
        return sum(layer.token_bytes for layer in self.layers if layer.window is None)

    @property
    def state_bytes(self) -> int:
        """Per sequence, whatever its length."""
        return sum(layer.state_bytes for layer in self.layers)

    def window_bytes(self, context: int) -> int:
        """Per sequence in sliding windows.

        Args:
            context: Tokens of the sequence.
        """
        return sum(layer.token_bytes * min(context, layer.window) for layer in self.layers if layer.window is not None)

    def sequence_bytes(self, context: int) -> int:
        """Everything that one sequence keeps.

        Args:
            context: Tokens of the sequence.
        """
        return self.token_bytes * context + self.window_bytes(context) + self.state_bytes


def kv_cache(config: Mapping[str, Any], *, tp: int, kv_dtype: str | None = None) -> KvCache:
    """Weigh the cache of a model.

    Args:
        config: config.json.
        tp: Tensor-parallel size.
        kv_dtype: A key of DTYPE_BYTES; None for the model's own type.
    """
    text = language_config(config)
    named = [part.get(name) for part in (text, config) for name in ("dtype", "torch_dtype")]
    own = next((name for name in named if isinstance(name, str)), None)
    dtype, kinds = kv_dtype or own, layer_kinds(text)
    if dtype is None or dtype not in DTYPE_BYTES:
        reason = f"config.json's dtype is {dtype!r}: name one with --kv-dtype"
        return KvCache(layers=tuple(_unknown(reason) for _ in kinds), dtype=None)
    twist = next((name for name in _TWISTS if text.get(name)), None)
    if twist is not None:
        reason = f"{twist} changes what layers keep in a way that is not known here"
        return KvCache(layers=tuple(_unknown(reason) for _ in kinds), dtype=dtype)
    shapes = _Shapes(text=text, tp=tp, kv_bytes=DTYPE_BYTES[dtype], own_bytes=DTYPE_BYTES.get(str(own), 2))
    return KvCache(layers=tuple(shapes.layer(kind, index) for index, kind in enumerate(kinds)), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shapes:
    """Bytes of a layer of each kind, from one model's fields."""

    text: Mapping[str, Any]
    """The language model's part of config.json."""
    tp: int
    kv_bytes: int
    """Per element of keys and values."""
    own_bytes: int
    """Per element of the model's own type, in which convolution states are."""

    def layer(self, kind: str, index: int) -> KvLayer:
        """One layer; a shape that is not told makes it unknown."""
        if kind in STRANGE:
            return _unknown(f"what layers with {kind} in config.json keep is not known here")
        if kind not in ("full", "indexed", "sliding", "chunked", "state", "conv", "none"):
            return _unknown(f"layers of type {kind!r} are not known here")
        try:
            if kind == "none":
                return KvLayer(kind="none")
            if kind in ("state", "conv"):
                return KvLayer(kind="state", state_bytes=self._conv() if kind == "conv" else self._state())
            if self.text.get("kv_lora_rank"):
                return KvLayer(kind="latent", token_bytes=self._latent(index))
            if kind == "indexed":
                return _unknown("index keys without a latent cache are not known here")
            is_local = kind in ("sliding", "chunked")
            window = self._window(kind) if is_local else None
            return KvLayer(
                kind="sliding" if is_local else "full", token_bytes=self._heads(is_local=is_local), window=window
            )
        except _NotToldError as missing:
            return _unknown(f"{kind} layers: config.json lacks {missing}")

    def _heads(self, *, is_local: bool) -> int:
        """Keys and values of the rank's heads; sliding layers may have their own."""
        heads = self._either("num_key_value_heads", is_local=is_local, default=self._number("num_attention_heads"))
        head_dim = self._either("head_dim", is_local=is_local, default=0)
        head_dim = head_dim or self._number("hidden_size") // self._number("num_attention_heads")
        value_dim = self._either("v_head_dim", is_local=is_local, default=head_dim)
        return max(1, -(-heads // self.tp)) * (head_dim + value_dim) * self.kv_bytes

    def _either(self, name: str, *, is_local: bool, default: int) -> int:
        """A number for sliding layers, for all, or the default."""
        if is_local and _is_size(self.text.get(f"swa_{name}")):
            return int(self.text[f"swa_{name}"])
        if is_local and name == "num_key_value_heads" and str(self.text.get("model_type")).startswith("mimo_v2"):
            raise _NotToldError(f"swa_{name}")  # they have other heads there: twice as many in the models so far
        other = self.text.get("attention_other_setting")
        if is_local and name == "num_key_value_heads" and isinstance(other, dict):
            if not _is_size(other.get("num_attention_groups")):
                raise _NotToldError("attention_other_setting.num_attention_groups")
            return int(other["num_attention_groups"])
        names = (name, "num_attention_groups") if name == "num_key_value_heads" else (name,)
        return next((int(self.text[n]) for n in names if _is_size(self.text.get(n))), default)

    def _window(self, kind: str) -> int:
        return (
            self._number("attention_chunk_size")
            if kind == "chunked"
            else self._number("sliding_window", "sliding_window_size")
        )

    def _latent(self, index: int) -> int:
        """The compressed vector with its rotary part, and index keys where this layer computes its own."""
        rotary = self.text.get("qk_rope_head_dim")
        if type(rotary) is not int:
            raise _NotToldError("qk_rope_head_dim")
        rank = self._number("kv_lora_rank")
        latent = (rank + rotary) * self.kv_bytes
        if self.text.get("index_topk") and self.kv_bytes == 1:
            # vLLM's packed form for sparse attention: a scale per 128 elements, and the rotary part in two bytes
            latent = rank + 4 * -(-rank // 128) + 2 * rotary
        if not self.text.get("index_topk") or self._shares_index(index):
            return latent
        keys = self._number("index_head_dim")
        scales = 4 * -(-keys // 128) if self.kv_bytes == 1 else 0
        return latent + keys * self.kv_bytes + scales

    def _shares_index(self, index: int) -> bool:
        types = self.text.get("indexer_types")
        return isinstance(types, list) and index < len(types) and types[index] == "shared"

    def _state(self) -> int:
        """A recurrent state and the convolution before it, by the first family whose fields are there."""
        text = self.text
        if "linear_num_value_heads" in text:
            return self._delta_net()
        linear = text.get("linear_attn_config")
        if isinstance(linear, dict) or "linear_num_heads" in text or "layer_group_size" in text:
            return self._delta_attention(linear if isinstance(linear, dict) else {})
        if any(name in text for name in ("mamba_num_heads", "mamba_n_heads")):
            return self._mamba2()
        if "mamba_d_state" in text:
            return self._mamba1()
        if any(
            name in text for name in ("attn_type_list", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha")
        ):
            heads, dim = self._number("num_attention_heads"), self._either("head_dim", is_local=False, default=0)
            dim = dim or self._number("hidden_size") // heads
            return self._cut(heads) * dim * dim * self._state_bytes()
        raise _NotToldError("the shape of their state")

    def _delta_net(self) -> int:
        """Gated delta net: key and value heads of their own sizes."""
        keys = self._number("linear_num_key_heads") * self._number("linear_key_head_dim")
        values = self._number("linear_num_value_heads") * self._number("linear_value_head_dim")
        conv = self._cut(2 * keys + values) * (self._number("linear_conv_kernel_dim") - 1) * self.own_bytes
        state = self._number("linear_key_head_dim") * self._number("linear_value_head_dim") * self._state_bytes()
        return conv + self._cut(self._number("linear_num_value_heads")) * state

    def _delta_attention(self, linear: Mapping[str, Any]) -> int:
        """Kimi delta attention: square states, one convolution each for query, key and value."""
        heads = linear.get("num_heads") or self._number("linear_num_heads", "num_attention_heads")
        dim = linear.get("head_dim") or self._number("linear_head_dim", "head_dim")
        kernel = linear.get("short_conv_kernel_size") or self._number(
            "linear_conv_kernel_dim", "short_conv_kernel_size"
        )
        if not all(_is_size(size) for size in (heads, dim, kernel)):
            raise _NotToldError("linear_attn_config's num_heads, head_dim and short_conv_kernel_size")
        conv = self._cut(3 * heads * dim) * (kernel - 1) * self.own_bytes
        return int(conv + self._cut(heads) * dim * dim * self._state_bytes())

    def _mamba2(self) -> int:
        heads = self._number("mamba_num_heads", "mamba_n_heads")
        dim = next((self.text[n] for n in ("mamba_head_dim", "mamba_d_head") if _is_size(self.text.get(n))), 0)
        dim = dim or self._number("expand", "mamba_expand") * self._number("hidden_size") // heads
        state, groups = self._number("ssm_state_size", "mamba_d_state"), self._number("n_groups", "mamba_n_groups")
        groups += 0 if groups % self.tp == 0 else self.tp - groups
        conv = self._cut(heads * dim + 2 * groups * state) * (self._number("conv_kernel", "mamba_d_conv") - 1)
        return conv * self.own_bytes + self._cut(heads) * dim * state * self._state_bytes()

    def _mamba1(self) -> int:
        inner = self._cut(self._number("mamba_expand") * self._number("hidden_size"))
        conv = inner * (self._number("mamba_d_conv") - 1) * self.own_bytes
        return conv + inner * self._number("mamba_d_state") * self._state_bytes()

    def _conv(self) -> int:
        return self._cut(self._number("hidden_size")) * (self._number("conv_L_cache") - 1) * self.own_bytes

    def _state_bytes(self) -> int:
        """Per element of a recurrent state: as the config says, else float32, which none exceeds."""
        named = next((self.text.get(n) for n in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype") if n in self.text), None)
        return DTYPE_BYTES.get(str(named), 4)

    def _cut(self, size: int) -> int:
        return -(-size // self.tp)

    def _number(self, *names: str) -> int:
        """The first of these fields that is a size."""
        for name in names:
            if _is_size(self.text.get(name)):
                return int(self.text[name])
        raise _NotToldError(" or ".join(names))


class _NotToldError(Exception):
    """A field that config.json lacks; it never leaves this module."""


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < math.inf


def _unknown(reason: str) -> KvLayer:
    return KvLayer(kind="unknown", reason=reason)
