"""Pipeline stages that plan: one plan for all, each its own part of it, and no stage that waits for another in vain."""

from __future__ import annotations

import json

import numpy as np
import pytest

from checkpoint_files import write_model
from engines.vllm.planned_ranks import LAYERS, ROW_BYTES, E, Ranks, gib, skewed_counts, vllm_config
from hotsplit.data import tiny_moe_path
from hotsplit.engines.vllm import planning
from hotsplit.errors import PlanMismatchError
from hotsplit.plan.choose import PlanChoice
from hotsplit.plan.learned import save_learned
from hotsplit.plan.planfile import plan_hash

TWO_LAYERS = 2 * (E // 2 + 1) * ROW_BYTES
"""Half of the experts of a stage of two, and a spare row per layer."""


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


@pytest.fixture
def configs(tmp_path):
    """configs(2, cuts=[1]) -> the configurations of all ranks of two pipeline stages, the first of one layer."""

    def make(pp, *, tp=1, cuts=None, model=None, num_bytes=TWO_LAYERS, **more):
        environ = {"HOTSPLIT_HOT_GIB": gib(num_bytes), "HOTSPLIT_STATE_DIR": str(tmp_path / "state")}
        environ |= {f"HOTSPLIT_{name}": value for name, value in more.items()}
        return [vllm_config(environ, rank=rank, pp=pp, tp=tp, cuts=cuts, model=model) for rank in range(pp * tp)]

    return make


def test_all_ranks_hold_one_plan_and_each_the_layers_of_its_stage(ranks, configs):
    prepared = ranks.prepare(*configs(2, tp=2, num_bytes=TWO_LAYERS // 2))
    assert 1 == len({plan_hash(one.choice.plan) for one in prepared})
    assert [(0, 1), (0, 1), (2, 3), (2, 3)] == [one.stage.layers for one in prepared]
    assert [(0, 1), (0, 1), (2, 3), (2, 3)] == [one.sizes.identity.layers for one in prepared]
    assert [True, False, True, False] == [one.is_learning for one in prepared]
    assert {2 * E * ROW_BYTES // 2} == {one.expert_bytes for one in prepared}


def test_a_stage_keeps_the_budget_by_itself(ranks, configs):
    for one in ranks.prepare(*configs(2)):
        assert (TWO_LAYERS, TWO_LAYERS) == (one.stage.budget_bytes, one.stage.needed_bytes(dynamic=True))
        assert [E // 2 + 1 + E // 2] * 2 == [rows.num_rows for rows in one.rows]


def test_stages_plan_from_what_all_of_them_have_learned(ranks, configs, tmp_path):
    for stage, layers in enumerate(([0, 1], [2, 3])):
        save_learned(skewed_counts(layers=layers), tmp_path / "state", stage=stage)
    prepared = ranks.prepare(*configs(2))
    weights_LE = skewed_counts().phases["decode"].counts
    for stage, one in enumerate(prepared):
        assert "learned alone" in one.choice.origin
        for layer, hot in zip((2 * stage, 2 * stage + 1), one.stage.hot, strict=True):
            assert set(np.argsort(-weights_LE[layer])[: len(hot)]) == set(hot)


def test_stages_that_all_fit_run_as_stock(ranks, configs):
    assert [True, True] == [one.is_stock for one in ranks.prepare(*configs(2, num_bytes=2 * E * ROW_BYTES))]


@pytest.fixture
def dense_first(tmp_path):
    """A model of four layers, of which the first is dense: headers over zeros."""
    tensors = {"model.embed_tokens.weight": ("BF16", [64, 128])}
    for layer in range(LAYERS):
        experts = [f"experts.{e}." for e in range(E)] if layer else [""]
        for name in experts:
            for side in ("gate_proj", "up_proj", "down_proj"):
                shape = [128, 64] if side == "down_proj" else [64, 128]
                tensors[f"model.layers.{layer}.mlp.{name}{side}.weight"] = ("BF16", shape)
    config = json.loads((tiny_moe_path() / "config.json").read_text(encoding="utf-8"))
    return write_model(tmp_path / "dense-first", tensors, config=config | {"mlp_only_layers": [0]})


def test_a_stage_that_fits_plans_all_the_same_where_another_does_not(ranks, configs, dense_first):
    small, large = ranks.prepare(*configs(2, model=dense_first, num_bytes=2 * E * ROW_BYTES - 1))
    assert [((1,), False), ((2, 3), False)] == [(one.stage.layers, one.is_stock) for one in (small, large)]
    assert [(E, E)] == [(rows.num_hot, rows.num_rows) for rows in small.rows]
    assert all(rows.num_hot < E for rows in large.rows)
    assert plan_hash(small.choice.plan) == plan_hash(large.choice.plan)


def test_a_stage_without_routed_experts_runs_as_stock_beside_those_that_plan(ranks, configs, dense_first, caplog):
    caplog.set_level("INFO", logger="hotsplit")
    none, *others = ranks.prepare(*configs(4, model=dense_first, num_bytes=TWO_LAYERS // 2))
    assert (True, [False] * 3) == (none.is_stock, [one.is_stock for one in others])
    assert [(1,), (2,), (3,)] == [one.stage.layers for one in others]
    assert 1 == caplog.text.count("pipeline stage 0 has no routed experts")


def test_layers_that_vllm_cuts_in_another_way_are_refused_with_the_variable_that_does_so(ranks, configs):
    with pytest.raises(PlanMismatchError, match=r"got \(.*\) in vLLM; wanted .*; leave VLLM_PP_LAYER_PARTITION out"):
        ranks.prepare(*configs(2, cuts=[1]))


def test_the_plan_does_not_depend_on_who_makes_it(ranks, configs, monkeypatch):
    made = []
    choose = planning.choose_plan
    monkeypatch.setattr(planning, "choose_plan", lambda *a, **k: made.append(choose(*a, **k)) or made[-1])
    ranks.prepare(*configs(4, num_bytes=TWO_LAYERS // 2))
    assert (4, 1) == (len(made), len({plan_hash(one.plan) for one in made}))
    assert all(isinstance(one, PlanChoice) for one in made)
