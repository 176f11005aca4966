"""A recipe's model on the scales of `fit`: its facts stand in for a checkpoint that is not here.

facts -> weigh -> dense weights as a range, KV cache as computed or as chosen -> fit
"""

from __future__ import annotations

from dataclasses import replace

from hotsplit.config import HotsplitConfig
from hotsplit.errors import CheckpointError, ConfigError
from hotsplit.files import read_json
from hotsplit.notices import Notice
from hotsplit.plan.fit import Fit, Load, Machine, fit
from hotsplit.plan.kv import KvCache, KvLayer
from hotsplit.plan.layouts import language_config
from hotsplit.plan.weigh import Range, Weighed, weigh
from hotsplit.recipes.recipe import Recipe
from hotsplit.units import GIB

CHOSEN = "chosen"
"""Kind of the one entry that stands for a KV cache whose size a recipe chose."""
RAM_RESERVE_BYTES = 8 * GIB
"""Host memory that is left for the system, the engine and reading files, as `hotsplit fit` leaves it."""


def weigh_recipe(recipe: Recipe, *, tp: int, kv_dtype: str | None = None) -> Weighed:
    """Weigh a recipe's model by its facts.

    Args:
        recipe: A recipe.
        tp: Tensor-parallel size.
        kv_dtype: Element type of the KV cache; None for the recipe's.

    Returns:
        As `weigh` would of a config.json and an index: dense weights from shared by all ranks to whole on each.

    Raises:
        CheckpointError: The facts do not describe a model.
        ConfigError: The recipe's total is less than what its experts weigh.
    """
    facts = recipe.facts
    weighed = weigh(facts.file, tp=tp, kv_dtype=kv_dtype or recipe.kv.dtype)
    weighed = replace(weighed, source="recipe", sizes=replace(weighed.sizes, name=recipe.name))
    if facts.total_bytes is None:
        return weighed
    whole = weigh(facts.file, tp=1)
    draft = whole.draft.least if facts.draft_bytes is None else facts.draft_bytes
    rest = facts.total_bytes - whole.sizes.expert_bytes - facts.host_bytes - draft
    if rest < 0:
        got = f"{facts.total_bytes}, {-rest} bytes less than its experts, draft layers and host_bytes"
        raise ConfigError(f"recipe {recipe.path}, facts.total_bytes", got=got, do="check it against the checkpoint")
    text = "the recipe knows the sum of dense weights, not which of them ranks share: a range, from shared to whole on each"
    kept = [notice for notice in weighed.notices if not notice.name.startswith("dense-")]
    return replace(
        weighed,
        dense=Range(least=-(-rest // tp), most=rest),
        draft=Range(least=-(-draft // tp), most=draft),
        notices=(*kept, Notice(name="dense-range", text=text, strict=False)),
    )


def with_kv_chosen(weighed: Weighed, *, kv_bytes: int, concurrency: int) -> Weighed:
    """Take a recipe's word for the KV cache on one rank.

    Args:
        weighed: A model.
        kv_bytes: On one rank, for all sequences.
        concurrency: Sequences.
    """
    each = KvLayer(kind=CHOSEN, state_bytes=-(-kv_bytes // concurrency))
    return replace(weighed, kv=KvCache(layers=(each,), dtype=weighed.kv.dtype))


def kv_bytes(recipe: Recipe, *, tp: int, context: int, concurrency: int, kv_dtype: str | None = None) -> int | None:
    """What the KV cache takes on one rank.

    Args:
        recipe: A recipe.
        tp: Tensor-parallel size.
        context: Tokens per sequence.
        concurrency: Sequences.
        kv_dtype: Element type; None for the recipe's.

    Returns:
        The recipe's choice, scaled to context and concurrency, where it makes one for this type and these ranks; else
        what the fields of its config say; None where they do not.
    """
    if has_chosen_kv(recipe, tp=tp, kv_dtype=kv_dtype):
        asked = recipe.kv.context * recipe.kv.concurrency
        return int((recipe.kv.gib or 0.0) * GIB * context * concurrency / asked)
    kv = weigh(recipe.facts.file, tp=tp, kv_dtype=kv_dtype or recipe.kv.dtype).kv
    return None if kv.unknown else kv.sequence_bytes(context) * concurrency


def has_chosen_kv(recipe: Recipe, *, tp: int, kv_dtype: str | None = None) -> bool:
    """Whether the recipe's choice of a KV cache holds: for its own type, and its own ranks where they share the cache.

    Args:
        recipe: A recipe.
        tp: Tensor-parallel size.
        kv_dtype: Element type; None for the recipe's.
    """
    if recipe.kv.gib is None or kv_dtype not in (None, recipe.kv.dtype):
        return False
    text = language_config(read_json(recipe.facts.file, what="facts", error=CheckpointError))
    is_whole = bool(text.get("kv_lora_rank")) or text.get("num_key_value_heads") == 1  # on every rank, however many
    return is_whole or tp == recipe.tp


def recipe_load(recipe: Recipe, *, config: HotsplitConfig | None = None) -> Load:
    """What the recipe asks of its machine.

    Args:
        recipe: A recipe.
        config: Settings; None for the recipe's own.
    """
    config = config or HotsplitConfig.from_options({}, recipe.settings)
    return Load(
        context=recipe.kv.context,
        concurrency=recipe.kv.concurrency,
        reserve_bytes=config.vram_reserve_bytes,
        ram_reserve_bytes=RAM_RESERVE_BYTES + recipe.facts.host_bytes,
        dynamic=config.dynamic,
    )


def fit_recipe(recipe: Recipe) -> tuple[Weighed, Fit]:
    """Put a recipe's model on its machine, by fit's own arithmetic.

    Args:
        recipe: A recipe; all its GPUs are one group of ranks.

    Raises:
        CheckpointError: The facts do not describe a model.
    """
    machine = Machine(
        num_gpus=recipe.machine.gpus,
        vram_bytes=int(recipe.machine.vram_gib * GIB),
        ram_bytes=(int(recipe.machine.ram_gib * GIB),),
    )
    weighed = weigh_recipe(recipe, tp=recipe.machine.gpus)
    load = recipe_load(recipe)
    if recipe.kv.gib is not None:
        weighed = with_kv_chosen(weighed, kv_bytes=int(recipe.kv.gib * GIB), concurrency=load.concurrency)
    return weighed, fit(weighed, machine=machine, load=load)
