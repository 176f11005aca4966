"""The plan's file: canonical bytes, and a reader that believes nothing."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import BudgetError, HotsplitError, PlanError, PlanMismatchError
from hotsplit.plan.planfile import from_json, load_plan, plan_hash, require_plan_for, save_plan, to_bytes
from hotsplit.plan.planner import PlanOptions, make_plan, plan_fraction
from plan_builders import histogram_of, sizes_of

COUNTS = [[70.0, 10.0, 10.0, 10.0], [40.0, 30.0, 20.0, 10.0]]
SIZES = sizes_of([8, 16], num_experts=4, first_layer=3, fixed_bytes=2)


def _plan(*, dynamic=True, budget_bytes=76, pp=1):
    options = PlanOptions(dynamic=dynamic, pp=pp)
    return make_plan(SIZES, histogram=histogram_of(COUNTS, first_layer=3), budget_bytes=budget_bytes, options=options)[
        0
    ]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_that_is_saved_is_the_plan_that_is_loaded(tmp_path, dynamic, pp):
    plan = _plan(dynamic=dynamic, pp=pp)
    save_plan(plan, tmp_path / "plan.json")
    assert plan == load_plan(tmp_path / "plan.json")


def test_a_plan_without_counts_keeps_its_nulls(tmp_path):
    plan, _ = make_plan(SIZES, histogram=None, budget_bytes=76, options=PlanOptions())
    save_plan(plan, tmp_path / "plan.json")
    assert plan == load_plan(tmp_path / "plan.json")


def test_the_file_is_canonical_json_with_decoder_indices_and_no_time():
    content = json.loads(to_bytes(_plan()))
    assert to_bytes(_plan()) == json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert {"format", "version", "identity", "objective", "row_bytes", "stages", "hot", "proof"} == content.keys()
    assert {"3": 8, "4": 16} == content["row_bytes"]
    assert {"3": [0, 1], "4": [0, 1]} == content["hot"]


def test_the_hash_is_of_the_bytes_and_changes_with_the_plan():
    assert 64 == len(plan_hash(_plan()))
    assert plan_hash(_plan()) == plan_hash(_plan())
    assert plan_hash(_plan()) != plan_hash(_plan(budget_bytes=60))


def _set(*keys, to):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("format", to="other"), "format"),
        (_set("version", to=2), "format"),
        (_set("version", to=True), "format"),
        (_set("surprise", to=1), "unknown 'surprise'"),
        (lambda content: content.pop("proof"), "no 'proof'"),
        (_set("objective", to="speed"), "objective"),
        (_set("objective", to=["share"]), "objective"),
        (_set("identity", to=[]), "identity"),
        (_set("identity", "layers", to=[4, 3]), "identity.layers"),
        (_set("identity", "layers", to=[]), "identity.layers"),
        (_set("identity", "layers", to=[3, 3]), "identity.layers"),
        (_set("identity", "num_experts", to=None), "identity.num_experts"),
        (_set("identity", "num_experts", to=10**10), "identity: got 2 layers x 10000000000 experts"),
        (_set("identity", "num_experts", to=10**30), "identity.num_experts"),
        (_set("identity", "layers", to=[3, 10**30]), "identity.layers"),
        (_set("identity", "top_k", to=10**400), "identity.top_k"),
        (_set("row_bytes", "3", to=2**53 + 1), "row_bytes.3"),
        (_set("stages", 0, "budget_bytes", to=10**400), "budget_bytes"),
        (_set("proof", "gap", to=10**400), "proof.gap"),
        (_set("proof", "worst_layer", to=10**400), "proof.worst_layer"),
        (_set("identity", "top_k", to=0), "identity.top_k"),
        (_set("identity", "model_type", to=7), "identity.model_type"),
        (_set("identity", "tp", to=True), "identity.tp"),
        (_set("identity", "pp", to=2), "stages"),
        (_set("row_bytes", "3", to=0), "row_bytes.3"),
        (lambda content: content["row_bytes"].pop("4"), "row_bytes"),
        (_set("hot", "5", to=[]), "hot"),
        (_set("hot", "3", to=[0, 4]), "hot.3"),
        (_set("hot", "3", to=[0, -1]), "hot.3"),
        (_set("hot", "3", to=[0, 0]), "hot.3"),
        (_set("hot", "3", to=[0, 1.0]), "hot.3"),
        (_set("hot", "3", to="01"), "hot.3"),
        (_set("hot", "3", to=[0]), "used_bytes"),
        (_set("stages", to={}), "stages"),
        (_set("stages", 0, "layers", to=[3]), "stages"),
        (_set("stages", 0, "layers", to=[4, 3]), "stages"),
        (_set("stages", 0, "budget_bytes", to=71), "used_bytes"),
        (_set("stages", 0, "used_bytes", to=75), "used_bytes"),
        (_set("stages", 0, "fixed_bytes", to=-1), "fixed_bytes"),
        (_set("proof", "bound", to=float("nan")), "proof.bound"),
        (_set("proof", "null", to=float("inf")), "proof.null"),
        (_set("proof", "hit_rate", to=1.5), "proof.hit_rate"),
        (_set("proof", "gap", to=True), "proof.gap"),
        (_set("proof", "worst_layer", to=9), "proof.worst_layer"),
        (_set("proof", "worst_layer", to=[]), "proof.worst_layer"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change, named):
    content = json.loads(to_bytes(_plan()))
    from_json(copy.deepcopy(content), what="plan x.json")
    change(content)
    with pytest.raises(PlanError, match=r"^plan x\.json, ") as caught:
        from_json(content, what="plan x.json")
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "hotsplit-plan"}', "\xff"])
def test_a_file_that_is_no_plan_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=r"plan\.json") as caught:
        load_plan(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_of_two_equal_keys_neither_is_believed(tmp_path):
    text = to_bytes(_plan()).decode().replace('"hot":{"3":', '"hot":{"3":[],"3":')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: got the key '3' twice in one object"):
        load_plan(tmp_path / "plan.json")


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="no such file"):
        load_plan(tmp_path / "plan.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["identity", "objective", "row_bytes", "stages", "hot", "proof"]), json_values)
def test_whatever_stands_in_a_field_the_answer_is_a_plan_or_a_plan_error(key, value):
    content = json.loads(to_bytes(_plan()))
    content[key] = value
    with pytest.raises(PlanError):
        from_json(content, what="plan x.json")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    (tmp_path / "folder").write_text("a file where a folder should be")
    with pytest.raises(HotsplitError, match="cannot write"):
        save_plan(_plan(), tmp_path / "folder" / "plan.json")
    assert "a file where a folder should be" == (tmp_path / "folder").read_text()


def test_a_plan_fits_the_model_that_it_was_made_for():
    assert [] == require_plan_for(_plan(), SIZES)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (replace(SIZES, identity=replace(SIZES.identity, top_k=2)), "top_k is 1, not 2"),
        (replace(SIZES, identity=replace(SIZES.identity, model_type="other")), "model_type is toy, not other"),
        (replace(SIZES, headers_hash="f" * 64), "headers_hash is 0"),
        (replace(SIZES, tp=2), "tp is 1, not 2"),
    ],
)
def test_a_plan_of_another_model_is_refused_by_field_unless_forced(sizes, named):
    with pytest.raises(PlanMismatchError, match=named):
        require_plan_for(_plan(), sizes)
    (notice,) = require_plan_for(_plan(), sizes, force=True)
    assert named in notice.text


def test_no_force_makes_a_plan_of_another_shape_fit():
    sizes = replace(SIZES, identity=replace(SIZES.identity, num_experts=8))
    with pytest.raises(PlanMismatchError, match="2 layers x 4 experts"):
        require_plan_for(_plan(), sizes, force=True)


def test_other_row_bytes_are_a_notice_while_the_budget_holds_and_an_error_after():
    slack = _plan(budget_bytes=75)
    # Two narrow rows and three wide ones, spare ones included, and 4 fixed bytes: 68, or 66 with the lighter rows.
    # The full plan has three narrow rows: 76, or 79 with the heavier rows.
    lighter = replace(SIZES, row_bytes=np.array([7, 16], dtype=np.int64))
    heavier = replace(SIZES, row_bytes=np.array([9, 16], dtype=np.int64))
    assert ["row-bytes-differ"] == [notice.name for notice in require_plan_for(slack, lighter)]
    with pytest.raises(BudgetError, match="at most its budget"):
        require_plan_for(_plan(budget_bytes=76), heavier)


def test_a_plan_made_without_a_model_is_no_plan_for_one():
    plan, _ = plan_fraction(histogram_of(COUNTS, first_layer=3), fraction=0.5, options=PlanOptions())
    with pytest.raises(PlanMismatchError, match="made without a model"):
        require_plan_for(plan, SIZES)


@pytest.mark.parametrize("name", ["tp", "pp"])
def test_more_ranks_than_any_machine_has_are_refused(name):
    content = json.loads(to_bytes(_plan()))
    content["identity"][name] = 10**9
    with pytest.raises(PlanError, match=f"identity.{name}: got 1000000000; wanted an integer from 1 to 65536"):
        from_json(content, what="plan p.json")
