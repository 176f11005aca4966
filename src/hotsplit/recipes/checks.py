"""A recipe held against what is known: its facts, its machine, its counts, and the flags that vLLM really has.

Each check is one sentence and one of three verdicts: ok, open (nobody can tell here), wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hotsplit.errors import CheckpointError, HotsplitError
from hotsplit.files import read_json
from hotsplit.plan.fit import Fit
from hotsplit.plan.layouts import language_config
from hotsplit.plan.outline import expert_shape
from hotsplit.plan.planfile import Plan, plan_hash
from hotsplit.plan.weigh import Weighed
from hotsplit.recipes.compose import layout_flags
from hotsplit.recipes.flags import NOTHING, ONE, VllmFlags
from hotsplit.recipes.planning import recipe_plan, recipe_sizes
from hotsplit.recipes.recipe import Recipe, RecipeFlag
from hotsplit.recipes.weighing import fit_recipe
from hotsplit.units import gib

Verdict = Literal["ok", "open", "wrong"]
MAX_ROWS = 992
"""Most rows of a layer under vLLM, whose kernels want fewer than 1,024 padded experts (docs/vllm.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    """A stable name in kebab case."""
    verdict: Verdict
    """What came out."""
    text: str
    """One line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A recipe, looked through."""

    checks: tuple[Check, ...]
    """In order."""
    weighed: Weighed | None
    """The model; None where its facts do not describe one."""
    fit: Fit | None
    """On the recipe's machine."""
    plan: Plan | None
    """On the reference counts, evenly without; None where there can be none."""

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.verdict != "wrong" for check in self.checks)


def check_recipe(recipe: Recipe, *, vllm: VllmFlags, whose: str) -> Checked:
    """Look a recipe through.

    Args:
        recipe: As it was read.
        vllm: Flags of a release.
        whose: Where they come from, for people: "the vLLM here", "vLLM 0.32.0, as shipped".
    """
    checks = [*_layout(recipe), *_flags(recipe, vllm=vllm, whose=whose)]
    try:
        checks += _facts(recipe)
        weighed, found = fit_recipe(recipe)
    except HotsplitError as error:
        failed = Check(name="facts", verdict="wrong", text=str(error))
        return Checked(checks=(failed, *checks), weighed=None, fit=None, plan=None)
    checks += _fits(recipe, found)
    plan = None
    try:
        plan, notices = recipe_plan(recipe)
        checks += _counts(recipe, plan, said=[notice.name for notice in notices])
    except HotsplitError as error:
        checks.append(Check(name="plan", verdict="wrong", text=str(error)))
    return Checked(checks=tuple(checks), weighed=weighed, fit=found, plan=plan)


def _layout(recipe: Recipe) -> Iterator[Check]:
    """Ranks and GPUs."""
    ranks = recipe.tp * recipe.pp
    yield Check(
        name="ranks",
        verdict="ok" if ranks == recipe.machine.gpus else "wrong",
        text=f"{recipe.tp} tensor-parallel x {recipe.pp} pipeline-parallel ranks on {recipe.machine.gpus} GPUs",
    )


def _facts(recipe: Recipe) -> Iterator[Check]:
    """What the recipe says of the model, against what the fields of its config say."""
    config: Mapping[str, Any] = read_json(recipe.facts.file, what="facts", error=CheckpointError)
    sizes, text = recipe_sizes(recipe), language_config(config)
    identity, facts = sizes.identity, recipe.facts
    pairs = {
        "layers": (facts.layers, sizes.num_decoder_layers),
        "moe_layers": (facts.moe_layers, len(identity.layers or ())),
        "experts": (facts.experts, identity.num_experts),
        "top_k": (facts.top_k, identity.top_k),
    }
    for name, (said, found) in pairs.items():
        verdict: Verdict = "ok" if said == found else "wrong"
        yield Check(name=f"facts-{name}", verdict=verdict, text=f"{name}: the recipe says {said}, its config {found}")
    for name, size in (
        ("attention heads", text.get("num_attention_heads")),
        ("hidden elements of an expert", expert_shape(config, what=f"facts {facts.file}").hidden_dim),
    ):
        if type(size) is int:
            divides = size % recipe.tp == 0
            yield Check(
                name="tp-divides",
                verdict="ok" if divides else "wrong",
                text=f"{size} {name} over {recipe.tp} ranks: {size // recipe.tp if divides else 'not'} each",
            )
    most = text.get("max_position_embeddings")
    if type(most) is int:
        verdict = "ok" if recipe.kv.context <= most else "wrong"
        yield Check(name="context", verdict=verdict, text=f"context {recipe.kv.context:,} of at most {most:,}")
    rows = (identity.num_experts or 0) + 1
    yield Check(
        name="rows", verdict="ok" if rows <= MAX_ROWS else "wrong", text=f"{rows} rows a layer, vLLM takes {MAX_ROWS}"
    )


def _fits(recipe: Recipe, found: Fit) -> Iterator[Check]:
    """On the recipe's machine, by fit's own arithmetic."""
    machine = recipe.machine
    where = f"{machine.gpus} x {machine.vram_gib:g} GiB and {machine.ram_gib:g} GiB of host memory"
    verdicts: dict[bool | None, tuple[Verdict, str]] = {
        True: ("ok", "fits"),
        False: ("wrong", "does not fit"),
        None: ("open", "may fit"),
    }
    verdict, said = verdicts[found.fits]
    texts = [f"{said} {where}"] + [finding.text for finding in found.findings]
    yield Check(name="fits", verdict=verdict, text="; ".join(texts))


def _counts(recipe: Recipe, plan: Plan, *, said: list[str]) -> Iterator[Check]:
    """The reference counts, and what a plan on them is worth."""
    stage = plan.stages[0]
    size = f"{gib(stage.used_bytes)} of {gib(stage.budget_bytes)} on each rank, plan {plan_hash(plan)[:12]}"
    if recipe.counts.file is None:
        text = f"no free histogram: {plan.hot_rows().min()} hot experts in every layer, {size}; steps make one"
        yield Check(name="histogram", verdict="open", text=text)
        return
    rate, null = plan.proof.hit_rate or 0.0, plan.proof.null or 0.0
    useful = "no-skew" not in said
    text = f"{100 * rate:.1f} % hit in-sample, {100 * null:.1f} % by a blind choice, {size}"
    yield Check(name="histogram", verdict="ok" if useful else "wrong", text=text)


def _flags(recipe: Recipe, *, vllm: VllmFlags, whose: str) -> Iterator[Check]:
    """The recipe's flags, against those that there are."""
    wrong = 0
    for flag in (*layout_flags(recipe), *recipe.flags):
        fault = next((text for look in _FAULTS if (text := look(flag, vllm)) is not None), None)
        if fault is not None:
            wrong += 1
            yield Check(name="flag", verdict="wrong", text=f"{flag.flag}: {fault}, in {whose}")
    for bad in recipe.known_bad:
        if bad.is_flag and vllm.find(bad.name) is None:
            yield Check(name="known-bad", verdict="open", text=f"{bad.name} is known to be bad, and gone from {whose}")
        if any(bad.name == flag.flag and bad.value in (None, *flag.value) for flag in recipe.flags):
            wrong += 1
            yield Check(name="known-bad", verdict="wrong", text=f"{bad} is among the recipe's own flags: {bad.why}")
    if not wrong:
        yield Check(
            name="flags", verdict="ok", text=f"all {len(recipe.flags)} flags and those of layout are in {whose}"
        )


def _is_missing(flag: RecipeFlag, vllm: VllmFlags) -> str | None:
    option = vllm.find(flag.flag)
    if option is None:
        near = vllm.nearest(flag.flag)
        return f"no such flag; did you mean {near}?" if near else "no such flag"
    return None if option.names[0] == flag.flag else f"not its long spelling, {option.names[0]}"


def _takes_other(flag: RecipeFlag, vllm: VllmFlags) -> str | None:
    option = vllm.find(flag.flag)
    takes = ONE if option is None else option.takes
    if takes == NOTHING:
        return f"a switch, got {' '.join(flag.value)}" if flag.value else None
    if not flag.value:
        return "takes a value, got none"
    return f"takes one value, got {len(flag.value)}" if takes == ONE and len(flag.value) > 1 else None


def _is_no_choice(flag: RecipeFlag, vllm: VllmFlags) -> str | None:
    option = vllm.find(flag.flag)
    if option is None or option.choices is None:
        return None
    strange = [word for word in flag.value if word not in option.choices]
    return f"{', '.join(strange)} is none of {', '.join(option.choices)}" if strange else None


_FAULTS: tuple[Callable[[RecipeFlag, VllmFlags], str | None], ...] = (_is_missing, _takes_other, _is_no_choice)
"""What may be wrong with a flag, in the order in which it is looked for."""
