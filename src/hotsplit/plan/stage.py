"""What of a plan concerns one rank: its pipeline stage's layers, and that all ranks hold the same plan.

Between the plan and the banks: `plan -> stage -> banks`. A plan covers the whole model, and every rank makes or reads
the same one; a worker then takes the part of its own stage. Tensor-parallel ranks of a stage have the same part, since
each holds a shard of every expert. Where ranks cannot agree, or rows turn out to weigh something else when the engine
has made them, this is where it is said.

Shapes: L MoE layers of the model, S of one stage, E routed experts per layer, W ranks.

    >>> from hotsplit.plan.planfile import PlanIdentity, Proof, Stage
    >>> model = ModelIdentity(layers=(3, 4, 5), num_experts=4, top_k=1)
    >>> stages = (Stage(layers=(3,), budget_bytes=24, used_bytes=24, fixed_bytes=0),
    ...           Stage(layers=(4, 5), budget_bytes=40, used_bytes=40, fixed_bytes=0))
    >>> plan = Plan(identity=PlanIdentity(model=model, pp=2), objective="share", row_bytes=(8, 8, 8), stages=stages,
    ...             hot=((2, 0), (1,), (3, 0)), proof=Proof())
    >>> mine = stage_of(plan, 1)
    >>> mine.layers, mine.hot, mine.rows_of(np.array([[3.0], [4.0], [5.0]])).ravel()
    ((4, 5), ((1,), (3, 0)), array([4., 5.]))
    >>> mine.needed_bytes(dynamic=True)                                        # two spare rows beside the three hot ones
    40
    >>> smallest_budget([40, 40])
    (40, None)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hotsplit.errors import BudgetError, PlanError, PlanMismatchError
from hotsplit.notices import Notice
from hotsplit.plan.budget import gib_to_ask
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.planfile import Plan
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import GIB

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The part of a plan that the ranks of one pipeline stage hold."""

    stage: int
    """Pipeline stage, 0 for the first."""
    identity: ModelIdentity
    """The model's, with the stage's layers: that of its counts and of its learned file."""
    layer_ids: range
    """Ordinals of its layers among all MoE layers of the model."""
    num_layers: int
    """All MoE layers of the model, L."""
    hot: tuple[tuple[int, ...], ...]
    """Hot expert ids per layer, most wanted first, S of them."""
    row_bytes: tuple[int, ...]
    """Bytes of one expert's row as planned, [S]."""
    budget_bytes: int
    """What the plan may take of fast memory on each rank of the stage, everything counted."""
    fixed_bytes: int
    """The part of it that stays fast for all experts."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder indices of its MoE layers, [S]; a stage may have none."""
        return self.identity.layers or ()

    def rows_of(self, array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """The stage's rows of an array over all layers: of the prior, for one.

        Args:
            array: One row per MoE layer of the model, [L, ...], any type.

        Returns:
            A view, [S, ...].

        Raises:
            PlanError: The array has another number of rows.
        """
        if len(array) != self.num_layers:
            raise PlanError(
                f"an array to take stage {self.stage} of",
                got=f"{len(array)} rows",
                wanted=f"one for each of the model's {self.num_layers} MoE layers",
            )
        return array[self.layer_ids.start : self.layer_ids.stop]

    def needed_bytes(
        self, *, dynamic: bool, row_bytes: Sequence[int] | None = None, fixed_bytes: int | None = None
    ) -> int:
        """Fast memory that the stage's hot rows take on one rank, everything counted.

        Args:
            dynamic: Whether layers that are neither wholly hot nor wholly cold have a spare row.
            row_bytes: Bytes of one expert's row, [S]; None for those of the plan.
            fixed_bytes: What stays fast for all experts; None for what the plan says.
        """
        rows_S = self.row_bytes if row_bytes is None else row_bytes
        fixed = self.fixed_bytes if fixed_bytes is None else fixed_bytes
        num_experts = self.identity.num_experts or 0
        taken_S = [len(experts) + (dynamic and 0 < len(experts) < num_experts) for experts in self.hot]
        return fixed + sum(rows * nbytes for rows, nbytes in zip(taken_S, rows_S, strict=True))


def stage_of(plan: Plan, stage: int) -> StagePlan:
    """Take one pipeline stage's part of a plan.

    Args:
        plan: For the whole model.
        stage: 0 for the first.

    Raises:
        PlanError: The plan has no such stage.
    """
    if not 0 <= stage < len(plan.stages):
        raise PlanError(f"pipeline stage {stage}", got=f"a plan of {len(plan.stages)} stages", wanted="one of them")
    start = sum(len(earlier.layers) for earlier in plan.stages[:stage])
    mine = plan.stages[stage]
    layer_ids = range(start, start + len(mine.layers))
    return StagePlan(
        stage=stage,
        identity=replace(plan.identity.model, layers=mine.layers),
        layer_ids=layer_ids,
        num_layers=len(plan.layers),
        hot=plan.hot[start : layer_ids.stop],
        row_bytes=plan.row_bytes[start : layer_ids.stop],
        budget_bytes=mine.budget_bytes,
        fixed_bytes=mine.fixed_bytes,
    )


def stage_sizes(sizes: ExpertSizes, layers: Sequence[int]) -> ExpertSizes:
    """Restrict sizes to some layers: those of one pipeline stage.

    Dense bytes, headers hash and all decoder layers stay those of the whole model.

    Args:
        sizes: Of the whole model.
        layers: Decoder indices of MoE layers, in the model's order.

    Raises:
        PlanError: A layer is none of the model's MoE layers, or the order is another.
    """
    layer_id_of = {layer: layer_id for layer_id, layer in enumerate(sizes.identity.layers or ())}
    foreign = [layer for layer in layers if layer not in layer_id_of]
    if foreign or list(layers) != sorted(set(layers)):
        raise PlanError(
            "layers of a pipeline stage",
            got=f"layer {foreign[0]}" if foreign else f"{list(layers)}",
            wanted="MoE layers of the model, in its order",
            layers=tuple(layers),
        )
    mine = [layer_id_of[layer] for layer in layers]
    return replace(
        sizes,
        identity=replace(sizes.identity, layers=tuple(layers)),
        row_bytes=sizes.row_bytes[mine],
        fixed_bytes=sizes.fixed_bytes[mine],
    )


def smallest_budget(budgets: Sequence[int]) -> tuple[int, Notice | None]:
    """The budget that all ranks can keep: a plan holds the same rows on each of them.

    Args:
        budgets: Bytes per rank, [W], of all ranks that share the plan: of a tensor-parallel group, or of all its
            stages' where they have one budget.

    Returns:
        The smallest, and a notice that names all of them where they differ.

    Raises:
        PlanError: There are none.
    """
    if not budgets:
        raise PlanError("budgets of the ranks", got="none", wanted="one per rank")
    smallest = min(budgets)
    if smallest == max(budgets):
        return smallest, None
    listed = ", ".join(gib_to_ask(budget) for budget in budgets)
    text = (
        f"the ranks' hot budgets differ ({listed} GiB on ranks 0 to {len(budgets) - 1}): the plan uses the smallest, "
        f"{gib_to_ask(smallest)} GiB, on all of them"
    )
    return smallest, Notice(name="budgets-differ", text=text, strict=False)


def require_same_hash(hashes: Sequence[str]) -> None:
    """Refuse to start where ranks hold different plans: each would map an expert's shards to other rows.

    Args:
        hashes: Plan hash of every rank, [W].

    Raises:
        PlanMismatchError: They differ; names who holds what. `ranks` are those that differ from most.
    """
    if len(set(hashes)) <= 1:
        return
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(hashes):
        ranks_of[digest].append(rank)
    usual = Counter(hashes).most_common(1)[0][0]
    differing = [rank for rank, digest in enumerate(hashes) if digest != usual]
    raise PlanMismatchError(
        "the ranks hold different plans",
        got="; ".join(f"{_name_ranks(ranks)}: {digest[:16]}" for digest, ranks in ranks_of.items()),
        wanted="the same plan on all ranks",
        do="give all ranks the same version of hotsplit, settings and files (counts, plan, state directory)",
        ranks=differing,
        hashes=tuple(hashes),
    )


def revalidate(
    stage: StagePlan, *, row_bytes: Sequence[int], fixed_bytes: int = 0, budget_bytes: int, dynamic: bool
) -> list[Notice]:
    """Check a stage's part of the plan against its budget again, with the rows as the engine has made them.

    An engine may pad or repack what the checkpoint holds. What is checked is that the planned rows still fit; which
    experts they hold stays as planned.

    Args:
        stage: As planned.
        row_bytes: Real bytes of one expert's row, [S].
        fixed_bytes: Real bytes that stay fast for all experts.
        budget_bytes: What may be taken on this rank, everything counted: as asked for, not as capped by the plan.
        dynamic: Whether there are spare rows.

    Returns:
        A notice where bytes differ from those of the plan, and fit.

    Raises:
        PlanError: Rows of another number of layers.
        BudgetError: They do not fit. Names the smallest budget that these hot rows fit (`minimum_bytes`), and the
            largest for which any plan of the checkpoint's rows would have fitted (`maximum_bytes`).
    """
    if len(row_bytes) != len(stage.layers):
        got, wanted = f"rows of {len(row_bytes)} layers", f"{len(stage.layers)}, those of stage {stage.stage}"
        raise PlanError("row bytes at start", got=got, wanted=wanted)
    needed = stage.needed_bytes(dynamic=dynamic, row_bytes=row_bytes, fixed_bytes=fixed_bytes)
    change = _change(stage, row_bytes=row_bytes, fixed_bytes=fixed_bytes)
    if needed > budget_bytes:
        maximum = _largest_plan(stage, row_bytes=row_bytes, fixed_bytes=fixed_bytes, budget_bytes=budget_bytes)
        holds_rows = change and maximum > stage.fixed_bytes
        spared = f"; a plan made for {_gib_that_fits(maximum)} GiB would have fitted" if holds_rows else ""
        raise BudgetError(
            f"hot rows of pipeline stage {stage.stage} as they are at start",
            got=f"{gib_to_ask(needed)} GiB{f' ({change})' if change else ''}",
            wanted=f"at most the hot budget, {_gib_that_fits(budget_bytes)} GiB",
            do=f"HOTSPLIT_HOT_GIB={gib_to_ask(needed)} holds these rows" + spared,
            budget_bytes=budget_bytes,
            minimum_bytes=needed,
            maximum_bytes=maximum,
        )
    if not change:
        return []
    text = f"{change}; with them the hot rows take {gib_to_ask(needed)} GiB and still fit their budget"
    return [Notice(name="row-bytes-differ", text=text, strict=False)]


def _change(stage: StagePlan, *, row_bytes: Sequence[int], fixed_bytes: int) -> str:
    """What differs from the plan, by its first layer; empty where nothing does."""
    for layer, planned, real in zip(stage.layers, stage.row_bytes, row_bytes, strict=True):
        if real != planned:
            return f"a row of layer {layer} has {real} bytes where the plan has {planned}"
    if fixed_bytes != stage.fixed_bytes:
        return f"{fixed_bytes} bytes stay fast for all experts where the plan has {stage.fixed_bytes}"
    return ""


def _largest_plan(stage: StagePlan, *, row_bytes: Sequence[int], fixed_bytes: int, budget_bytes: int) -> int:
    """The largest budget of which every plan, made with the planned bytes, keeps `budget_bytes` with the real ones.

    A plan's rows grow at most by the largest ratio of real to planned bytes.
    """
    growth = max(
        (Fraction(real, planned) for planned, real in zip(stage.row_bytes, row_bytes, strict=True)),
        default=Fraction(1),
    )
    return max(math.floor((budget_bytes - fixed_bytes) / growth) + stage.fixed_bytes, 0)


def _gib_that_fits(nbytes: int) -> str:
    """Bytes in GiB, rounded down to six decimals: typed back as a setting it is not too much."""
    return f"{math.floor(nbytes / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
