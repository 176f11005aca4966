"""What a worker decides before its model is built, on the bundled model and without vLLM."""

from __future__ import annotations

import json

import pytest

from engines.vllm.planned_ranks import (
    ALL_BYTES,
    LAYERS,
    ROW_BYTES,
    E,
    Ranks,
    gib,
    model_sizes,
    skewed_counts,
    vllm_config,
)
from hotsplit.engines.vllm import refusals, settings
from hotsplit.errors import BankError, BudgetError, EngineError, PlanError, PlanMismatchError, UnsupportedEngineError
from hotsplit.host import demand
from hotsplit.plan.learned import save_learned
from hotsplit.plan.planfile import plan_hash, save_plan
from hotsplit.plan.planner import PlanOptions, make_plan

HALF = LAYERS * (E // 2 + 1) * ROW_BYTES
"""Half of the experts hot, and a spare row per layer."""


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


@pytest.fixture
def environ(tmp_path):
    """environ(DYNAMIC="0") -> half of the experts, and nothing learned."""
    return lambda **more: {
        "HOTSPLIT_HOT_GIB": gib(HALF),
        "HOTSPLIT_STATE_DIR": str(tmp_path / "state"),
        **{f"HOTSPLIT_{name}": value for name, value in more.items()},
    }


@pytest.fixture
def log(caplog):
    caplog.set_level("INFO", logger="hotsplit")
    return lambda: "\n".join(caplog.messages)


def of(num_bytes):
    return {"HOT_GIB": gib(num_bytes)}


@pytest.mark.parametrize(("num_bytes", "is_stock"), [(ALL_BYTES, True), (ALL_BYTES - 1, False), (10 * ALL_BYTES, True)])
def test_a_model_that_fits_runs_as_stock_and_that_is_said(ranks, environ, log, num_bytes, is_stock):
    (prepared,) = ranks.prepare(vllm_config(environ(**of(num_bytes))))
    assert is_stock == prepared.is_stock
    assert is_stock == ("all routed experts of this rank fit (6.0 MiB of " in log())
    assert is_stock == ("[fits]" in log())


def test_a_model_that_runs_as_stock_has_no_plan(ranks, environ):
    (prepared,) = ranks.prepare(vllm_config(environ(**of(ALL_BYTES))))
    with pytest.raises(EngineError, match="the plan of this worker: got a model that runs unchanged"):
        _ = prepared.stage


def test_the_budget_that_was_given_is_used_and_said_with_where_it_is_from(ranks, environ, log):
    (prepared,) = ranks.prepare(vllm_config(environ()))
    assert (HALF, HALF) == (prepared.asked_bytes, prepared.stage.budget_bytes)
    assert [E // 2] * LAYERS == [rows.num_hot for rows in prepared.rows]
    assert "hotsplit: budget per rank: 3.2 MiB (HOTSPLIT_HOT_GIB, environment)" in log()


def default_budget(ranks, environ, **options):
    settings_of = {"HOTSPLIT_VRAM_RESERVE_GIB": "0", **environ()}
    del settings_of["HOTSPLIT_HOT_GIB"]
    return ranks.prepare(*(vllm_config(settings_of, rank=rank, **options) for rank in range(options.get("tp", 1))))[0]


def test_without_a_budget_it_is_what_memory_leaves(monkeypatch, environ, log):
    ranks = Ranks(monkeypatch, memory_bytes=HALF + model_sizes().dense_bytes + 2**20)
    prepared = default_budget(ranks, environ, kv_cache_bytes=2**20)
    assert HALF == prepared.asked_bytes
    assert "KV cache" in log()


def test_ranks_of_one_host_share_what_memory_leaves(monkeypatch, environ):
    ranks = Ranks(monkeypatch, memory_bytes=HALF + model_sizes(tp=2).dense_bytes)
    assert HALF // 2 == default_budget(ranks, environ, tp=2).asked_bytes


def test_without_a_budget_and_a_known_limit_one_is_asked_for(monkeypatch, environ):
    with pytest.raises(BudgetError, match="the default hot budget.*set HOTSPLIT_HOT_GIB"):
        default_budget(Ranks(monkeypatch, memory_bytes=None), environ)


def test_offload_flags_are_said_where_they_do_not_act(ranks, environ, log):
    settings_of = {name: value for name, value in environ().items() if name != "HOTSPLIT_HOT_GIB"}
    ranks.prepare(vllm_config(settings_of, offload={"cpu_offload_gb": 4}))
    assert "vLLM ignores --cpu-offload-gb 4 on a CPU" in log()


def test_of_budgets_that_differ_all_ranks_take_the_smallest_and_say_so(ranks, environ, log):
    configs = [
        vllm_config(environ(**of(num_bytes)), rank=i, tp=2) for i, num_bytes in enumerate((HALF // 2, HALF // 3))
    ]
    both = ranks.prepare(*configs)
    assert [HALF // 3] * 2 == [prepared.asked_bytes for prepared in both]
    assert 1 == len({plan_hash(prepared.choice.plan) for prepared in both})
    assert "[budgets-differ]" in log()


def test_ranks_with_other_plans_stop_before_anything_is_loaded(ranks, environ, tmp_path):
    given = [environ(**of(HALF // 2), OBJECTIVE=name) for name in ("share", "time")]
    configs = [vllm_config(environ, rank=rank, tp=2) for rank, environ in enumerate(given)]
    with pytest.raises(PlanMismatchError, match="the ranks hold different plans: got rank 0: .*; rank 1: "):
        ranks.prepare(*configs)
    assert "rows" not in configs[0].additional_config[settings.KEY]


def made_plan(num_bytes, *, dynamic=True):
    options = PlanOptions(dynamic=dynamic)
    return make_plan(model_sizes(), histogram=skewed_counts(), budget_bytes=num_bytes, options=options)[0]


def test_a_plan_file_is_used_as_it_is(ranks, environ, tmp_path, log):
    plan = made_plan(HALF // 2)
    save_plan(plan, tmp_path / "plan.json")
    given = {name: value for name, value in environ(PLAN=str(tmp_path / "plan.json")).items() if "HOT_GIB" not in name}
    (prepared,) = ranks.prepare(vllm_config(given))
    assert (plan, plan.hot) == (prepared.choice.plan, prepared.stage.hot)
    assert prepared.choice.origin.startswith(f"plan {tmp_path / 'plan.json'}")


def test_a_plan_file_rules_also_where_every_expert_fits(ranks, environ, tmp_path):
    plan = made_plan(HALF)
    save_plan(plan, tmp_path / "plan.json")
    given = environ(PLAN=str(tmp_path / "plan.json"))
    del given["HOTSPLIT_HOT_GIB"]
    (prepared,) = ranks.prepare(vllm_config(given))
    assert (False, HALF) == (prepared.is_stock, prepared.stage.budget_bytes)


def test_a_plan_file_for_another_budget_is_an_error(ranks, environ, tmp_path):
    save_plan(made_plan(HALF // 2), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="leave HOTSPLIT_HOT_GIB out"):
        ranks.prepare(vllm_config(environ(PLAN=str(tmp_path / "plan.json"))))


@pytest.mark.parametrize(("learned", "is_used"), [("use", True), ("ignore", False)])
def test_learned_counts_are_used_unless_they_are_to_be_ignored(ranks, environ, tmp_path, learned, is_used):
    save_learned(skewed_counts(), tmp_path / "state")
    (prepared,) = ranks.prepare(vllm_config(environ(LEARNED=learned)))
    assert is_used == ("learned alone" in prepared.choice.origin)
    assert is_used == (made_plan(HALF).hot == prepared.stage.hot)
    assert is_used == prepared.is_learning


@pytest.mark.parametrize(
    ("more", "rows"), [({}, "33x4"), ({"DYNAMIC": "0"}, "32x4"), (of(ALL_BYTES - 1) | {"DYNAMIC": "0"}, "32x4")]
)
def test_numbers_of_rows_go_into_the_configuration_that_keys_compiled_code(ranks, environ, more, rows):
    config = vllm_config(environ(**more))
    before = json.loads(json.dumps(config.additional_config))
    ranks.prepare(config)
    assert rows == config.additional_config[settings.KEY].pop("rows")
    assert before == config.additional_config


def test_settings_are_said_once_and_with_them_those_that_have_no_effect(ranks, environ, log):
    given = environ(**of(HALF // 2), NUMA_POLICY="bind", KERNEL="exact", DYN_MARGIN="2", DYNAMIC="0")
    ranks.prepare(*(vllm_config(given, rank=rank, tp=2) for rank in range(2)))
    assert 1 == log().count("hotsplit: settings ")
    assert "HOTSPLIT_DYN_MARGIN=2 (environment)" in log()
    for name in ("NUMA_POLICY", "KERNEL", "DYN_MARGIN"):
        assert f"HOTSPLIT_{name} has no effect" in log()


def test_settings_that_were_not_given_are_not_called_idle(ranks, environ, log):
    ranks.prepare(vllm_config(environ(DYN_MARGIN="2", OBJECTIVE="time")))
    assert "has no effect" not in log()


def test_settings_that_let_traffic_thrash_are_named(ranks, environ, log):
    ranks.prepare(vllm_config(environ(DYN_HALF_LIFE="0.2", DYN_MARGIN="1")))
    assert "[may-thrash]" in log()


def test_a_worker_without_settings_stops(ranks):
    config = vllm_config({"HOTSPLIT_ENABLE": "1"})
    del config.additional_config[settings.KEY]
    with pytest.raises(EngineError, match="its settings have not come with vLLM's configuration"):
        ranks.prepare(config)


def test_more_rows_than_kernels_take_are_refused(ranks, environ, monkeypatch):
    monkeypatch.setattr(refusals, "MAX_ROWS", E)
    with pytest.raises(UnsupportedEngineError, match="rows of a layer: got 33; wanted at most 32"):
        ranks.prepare(vllm_config(environ()))


def test_what_the_host_cannot_hold_is_refused_before_anything_is_allocated(monkeypatch, environ):
    ranks = Ranks(monkeypatch, memory_bytes=2**31 + HALF)
    with pytest.raises(BudgetError, match=r"the run exceeds host memory: got hot rows 3.2 MiB, dense weights 1.0 MiB"):
        ranks.prepare(vllm_config(environ()))


def test_a_full_bank_disk_is_refused_before_anything_is_allocated(ranks, environ, monkeypatch):
    monkeypatch.setattr(demand, "free_disk_bytes", lambda _: LAYERS * E // 2 * ROW_BYTES - 1)
    with pytest.raises(BudgetError, match="HOTSPLIT_BANK_DIR"):
        ranks.prepare(vllm_config(environ()))


def test_a_bank_folder_that_cannot_be_is_refused(ranks, environ, tmp_path):
    (tmp_path / "bank").write_text("a file is in the way")
    with pytest.raises(BankError, match="bank folder .*which is no folder"):
        ranks.prepare(vllm_config(environ(BANK_DIR=str(tmp_path / "bank"))))


def test_real_rows_that_still_fit_are_told_and_those_that_do_not_are_refused(ranks, environ):
    (prepared,) = ranks.prepare(vllm_config(environ()))
    sizes, notices = prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF)
    assert ([], prepared.expert_bytes) == (notices, sizes.expert_bytes)
    sizes, notices = prepared.with_real_rows([ROW_BYTES - 64] * LAYERS, hot_bytes=HALF)
    assert ["row-bytes-differ"] == [notice.name for notice in notices]
    assert [ROW_BYTES - 64] * LAYERS == sizes.row_bytes.tolist()
    with pytest.raises(BudgetError, match="as they are at start"):
        prepared.with_real_rows([ROW_BYTES + 64] * LAYERS, hot_bytes=HALF)
    with pytest.raises(BudgetError, match="as they are at start"):
        prepared.with_real_rows([ROW_BYTES] * LAYERS, hot_bytes=HALF + 1)
