"""Which decoder layers attend to what, and which have routed experts: schedules read off config.json's fields.

Under `kv` and `outline`. Configs spell schedules in a dozen ways: a list of names, a list of bits, a period, a first
layer. Each way is one small function here, tried in order; the fields decide, whatever the model is called.

    >>> layer_kinds({"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]})
    ['state', 'state', 'state', 'full']
    >>> moe_layers({"num_hidden_layers": 4, "n_routed_experts": 8, "first_k_dense_replace": 1})
    (1, 2, 3)

Source: the field names and defaults are those of the configuration classes in transformers 5.23 (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotsplit.plan.layouts import model_facts

Config = Mapping[str, Any]

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "conv",
    "moe": "none",
    "mlp": "none",
    "*": "full",
    "M": "state",
    "E": "none",
    "-": "none",
}
"""What layer_types and its older names say, by our kinds; letters are those of hybrid_override_pattern."""
STRANGE = (
    "compress_rates",
    "compress_ratios",
    "compress_rate_csa",
    "ssm_cfg",
    "ssm_state_size",
    "mamba_d_state",
    "zero_expert_num",
)
"""Fields of kinds that need a schedule: without one, nothing is taken for granted."""


def layer_kinds(text: Config) -> list[str]:
    """What every decoder layer keeps of the past: full, sliding, chunked, indexed, state, conv or none.

    Args:
        text: The language model's part of config.json.

    Returns:
        One kind per decoder layer, as the config spells it where it is not one of these; a single entry where even
        the number of layers is not known.
    """
    num_layers = model_facts(text).num_layers
    if num_layers is None:
        return ["an unknown number of layers"]
    strange = next((name for name in STRANGE if name in text), None)
    # a window beside such a field is one of several things that a layer keeps
    windows = (_windows,) if strange is None else ()
    for schedule in (_named, _bits, _delta_attention, _every_nth_full, _attention_period, *windows):
        kinds = schedule(text, num_layers)
        if kinds is not None:
            return kinds if len(kinds) == num_layers else ["a schedule of another length"] * num_layers
    return [strange or "full"] * num_layers


def _named(text: Config, num_layers: int) -> list[str] | None:
    """A list of names, or a pattern of letters; layers past the last one are draft layers."""
    for name in ("layer_types", "layers_block_type"):
        listed = text.get(name)
        if isinstance(listed, list) and listed:
            return [_KINDS.get(str(kind), str(kind)) for kind in listed[:num_layers]]
    pattern = text.get("hybrid_override_pattern")
    return [_KINDS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) and pattern else None


def _bits(text: Config, _num_layers: int) -> list[str] | None:
    """One bit per layer: 1 slides, or 1 is full where the other kind is linear."""
    if isinstance(bits := text.get("hybrid_layer_pattern"), list):
        return ["sliding" if bit else "full" for bit in bits]
    if isinstance(bits := text.get("attn_type_list"), list):
        return ["full" if bit else "state" for bit in bits]
    return None


def _delta_attention(text: Config, num_layers: int) -> list[str] | None:
    """Lists of layers, numbered from 1."""
    linear = text.get("linear_attn_config")
    listed = linear.get("kda_layers") if isinstance(linear, dict) else None
    if not isinstance(listed, list):
        return None
    return ["state" if number + 1 in listed else "full" for number in range(num_layers)]


def _every_nth_full(text: Config, num_layers: int) -> list[str] | None:
    """Every nth layer attends in full, the others are linear."""
    every = text.get("full_attention_interval") or text.get("layer_group_size")
    if "linear_num_value_heads" in text and every is None:
        every = 4  # the default of the only classes with that field
    if type(every) is not int or every < 1:
        return None
    return ["full" if (number + 1) % every == 0 else "state" for number in range(num_layers)]


def _attention_period(text: Config, num_layers: int) -> list[str] | None:
    """One attention layer per period, state-space layers between."""
    period, offset = text.get("attn_layer_period"), text.get("attn_layer_offset", 0)
    if type(period) is not int or period < 1:
        return None
    return ["full" if number % period == offset else "state" for number in range(num_layers)]


def _windows(text: Config, num_layers: int) -> list[str] | None:
    """A sliding window in all layers, from one layer on, or in all but every nth; none where it is switched off."""
    window = text.get("sliding_window")
    if type(window) is not int or text.get("use_sliding_window") is False:
        return None
    every, first = text.get("sliding_window_pattern"), text.get("max_window_layers")
    if type(every) is int and every > 0:
        return ["full" if (number + 1) % every == 0 else "sliding" for number in range(num_layers)]
    first = first if type(first) is int else 0
    return ["full" if number < first else "sliding" for number in range(num_layers)]


def moe_layers(text: Config) -> tuple[int, ...]:
    """Decoder indices of the layers with routed experts.

    Args:
        text: The language model's part of config.json.
    """
    num_layers = model_facts(text).num_layers or 0
    for schedule in (_listed, _frequency, _periods, _sparse_step, _range):
        chosen = schedule(text)
        if chosen is not None:
            return tuple(number for number in range(num_layers) if chosen(number))
    return tuple(range(num_layers))


Chosen = Callable[[int], bool]


def _listed(text: Config) -> Chosen | None:
    """A list of names, of bits, or of layers."""
    for name in ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern"):
        listed = text.get(name)
        if isinstance(listed, list | str) and set(map(str, listed)) & {"sparse", "moe", "hash_moe", "E"}:
            kinds = [str(kind) in ("sparse", "moe", "hash_moe", "E") for kind in listed]
            return lambda number: number < len(kinds) and kinds[number]
    if isinstance(bits := text.get("moe_layer_freq"), list):
        return lambda number: number < len(bits) and bool(bits[number])
    for name in ("moe_layers_enum", "moe_layers"):
        listed = text.get(name)
        if isinstance(listed, str):
            listed = [int(part) for part in listed.split(",") if part.strip().isdigit()]
        if isinstance(listed, list) and listed:
            return lambda number: number in listed
    return None


def _frequency(text: Config) -> Chosen | None:
    """Every nth layer from a first one on."""
    first = next((text[n] for n in ("first_k_dense_replace", "num_dense_layers") if type(text.get(n)) is int), None)
    every = text.get("moe_layer_freq", 1)
    if first is None:
        return None
    return lambda number: number >= first and (type(every) is not int or number % max(every, 1) == 0)


def _periods(text: Config) -> Chosen | None:
    """One in a period."""
    if type(period := text.get("expert_layer_period")) is int and period > 0:
        return lambda number: number % period == text.get("expert_layer_offset", 0)
    if type(step := text.get("interleave_moe_layer_step")) is int and step > 0:
        return lambda number: (number + 1) % step == 0
    return None


def _sparse_step(text: Config) -> Chosen | None:
    """Every nth layer but for those that are listed as dense."""
    listed = text.get("mlp_only_layers")
    dense = listed if isinstance(listed, list) else []
    step = text.get("decoder_sparse_step", 1)
    if not dense and "decoder_sparse_step" not in text:
        return None
    return lambda number: number not in dense and (number + 1) % (step if type(step) is int and step > 0 else 1) == 0


def _range(text: Config) -> Chosen | None:
    """From one layer to another, every nth."""
    first, last = text.get("moe_layer_start_index"), text.get("moe_layer_end_index")
    every = text.get("moe_layer_interval", 1)
    if type(first) is not int:
        return None
    return lambda number: (
        number >= first
        and (type(last) is not int or last < 0 or number <= last)
        and ((number + 1) % (every if type(every) is int and every > 0 else 1) == 0)
    )
