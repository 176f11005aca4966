"""The route kernel and the small writes, in Triton's interpreter: equal to their torch twins, entry by entry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton")

from hotsplit.bank.kernels import reference, route_triton  # the line above decides whether these can be imported
from hotsplit.bank.kernels.reference import LayerCounters

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

E, FIXED, NUM_LAYERS, PHASES = 6, 2, 3, 2
LAYER = 1
POISON = -77
IDS = (*range(E + FIXED), -1, E + FIXED, -(2**31), 2**31 - 1)


def counters():
    """One layer's counters, as views of those of all layers."""
    return LayerCounters(
        pairs=torch.zeros(PHASES, NUM_LAYERS, E, dtype=torch.int64)[:, LAYER],
        totals=torch.zeros(PHASES, NUM_LAYERS, 4, dtype=torch.int64)[:, LAYER],
        stamps=torch.zeros(NUM_LAYERS, E, dtype=torch.int64)[LAYER],
        step=torch.zeros(2, dtype=torch.int64),
    )


def whole(found):
    """Every number of all layers."""
    return [getattr(found, field.name)._base.tolist() for field in dataclasses.fields(found) if field.name != "step"]


def row_map(*, dtype=torch.int64, seed=0):
    """A map between two others that must not be read."""
    maps = torch.full((NUM_LAYERS, E + FIXED), POISON, dtype=dtype)
    maps[LAYER] = torch.randperm(E + FIXED, generator=torch.Generator().manual_seed(seed))
    return maps[LAYER]


def random_ids(num_tokens, top_k, *, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(IDS, dtype=dtype)[torch.randint(len(IDS), (num_tokens, top_k), generator=generator)]


def require_equal(calls, *, first_cold=4, map_dtype=torch.int64):
    """Play calls on the kernel and on its twin: (step, phase, ids, padding, redirects) each."""
    found, wanted = counters(), counters()
    rows = row_map(dtype=map_dtype)
    for number, phase, ids, padding, redirects in calls:
        answers = []
        for kernels, held in ((route_triton, found), (reference, wanted)):
            kernels.begin_step(held.step, number=number, phase=phase)
            answers.append(
                kernels.route_and_count(
                    ids,
                    row_map=rows,
                    is_padding=padding,
                    counters=held,
                    first_cold=first_cold,
                    redirect_padding=redirects,
                )
            )
        assert (answers[1].dtype, answers[1].tolist()) == (answers[0].dtype, answers[0].tolist())
        assert whole(wanted) == whole(found)
    return found


@st.composite
def calls(draw):
    """Calls of a few steps, some steps with several calls; -1 is the phase of what is not counted."""
    found, number = [], 1
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    top_k = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 4))):
        num_tokens = draw(st.integers(0, 7))
        ids = draw(st.lists(st.sampled_from(IDS), min_size=num_tokens * top_k, max_size=num_tokens * top_k))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens + 3))
        padding = None if mask is None else torch.tensor(mask, dtype=torch.bool)
        ids_TK = torch.tensor(ids, dtype=dtype).reshape(num_tokens, top_k)
        found.append((number, draw(st.sampled_from([-1, 0, 1])), ids_TK, padding, draw(st.booleans())))
        number += draw(st.integers(0, 1))
    return found


@given(calls(), st.integers(0, E + FIXED), st.sampled_from([torch.int32, torch.int64]))
def test_rows_and_counters_equal_the_twins(played, first_cold, map_dtype):
    require_equal(played, first_cold=first_cold, map_dtype=map_dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", ["none", "late", "early", "all"])
def test_thousands_of_tokens_equal_the_twins(dtype, padding):
    num_tokens = 2500
    mask = torch.zeros(3000, dtype=torch.bool)
    mask[{"none": slice(0, 0), "late": slice(1, None), "early": slice(0, 2400), "all": slice(None)}[padding]] = True
    require_equal([(1, 0, random_ids(num_tokens, 3, dtype=dtype), mask, True)])


def test_a_speculative_step_counts_every_token_of_every_request():
    num_requests, tokens_each = 5, 4
    ids = torch.arange(num_requests * tokens_each * 2).reshape(-1, 2) % E
    padded = torch.cat([ids, torch.full((12, 2), -1)])
    mask = torch.arange(64) >= len(ids)
    found = require_equal([(1, 0, padded, mask, True)])
    assert len(ids) == found.totals[0, reference.TOTALS.index("tokens")]
    assert ids.numel() == found.pairs[0].sum()


def test_a_step_of_several_calls_touches_an_expert_once():
    ids = random_ids(9, 2)
    found = require_equal([(1, 0, ids, None, True), (1, 0, ids, None, True), (2, 0, ids, None, True)])
    num_touched = 2 * len({*ids.flatten().tolist()} & {*range(E)})
    assert num_touched == found.totals[0, 2:].sum()


def test_ids_and_padding_may_lie_apart():
    wide = random_ids(40, 8)
    mask = torch.rand(80, generator=torch.Generator().manual_seed(1)) < 0.5
    require_equal([(1, 0, wide[3:20, 2:5], mask[::2], True), (2, 1, wide.t()[:, :6], mask[1:], True)])


def test_no_tokens_change_nothing():
    found = require_equal([(1, 0, random_ids(0, 3), None, True)])
    assert (0, 0) == (found.pairs.sum(), found.totals.sum())


def test_padding_is_sent_where_the_first_real_token_goes_and_to_row_0_where_there_is_none():
    ids, rows = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.arange(E) + 10

    def route(*mask):
        return route_triton.route_and_count(
            ids, row_map=rows, is_padding=torch.tensor(mask), counters=counters(), first_cold=E
        ).tolist()

    assert [[12, 13], [12, 13], [14, 15]] == route(True, False, False)
    assert [[0, 0]] * 3 == route(True, True, True)


@pytest.mark.parametrize("kernels", [route_triton, reference])
def test_padding_that_an_engine_leaves_out_itself_is_left_out(kernels):
    found, ids = counters(), torch.tensor([[-1, -1], [2, 3], [-1, 4]])
    kernels.begin_step(found.step, number=1, phase=0)
    rows = kernels.route_and_count(
        ids,
        row_map=torch.arange(E) + 10,
        is_padding=torch.tensor([True, False, True]),
        counters=found,
        first_cold=E,
    )
    assert [[-1, -1], [12, 13], [-1, 13]] == rows.tolist()
    assert 2 == found.pairs.sum()


@pytest.mark.parametrize(("number", "phase"), [(1, 0), (16, 1), (2**40, -1)])
def test_a_step_is_begun_with_its_number_and_phase(number, phase):
    step = torch.zeros(4, dtype=torch.int64)
    route_triton.begin_step(step[1:3], number=number, phase=phase)
    assert [0, number, phase, 0] == step.tolist()


def published(kernels, entries, *, num_maps):
    maps = [torch.arange(3 * 20, dtype=dtype).reshape(3, 20) for dtype in (torch.int32, torch.int64)][-num_maps:]
    kernels.publish(maps, entries=entries)
    return [row_map.tolist() for row_map in maps]


entries = st.tuples(st.integers(0, 2), st.integers(0, 19), st.integers(0, 2**31 - 1))


@given(st.lists(entries, max_size=20), st.sampled_from([1, 2]))
def test_a_publish_writes_its_entries_and_nothing_else(drawn, num_maps):
    assert published(reference, drawn, num_maps=num_maps) == published(route_triton, drawn, num_maps=num_maps)


@pytest.mark.parametrize("count", [8, 9, 128, 129, 300])
def test_a_publish_may_have_any_number_of_entries(count):
    drawn = [(i % 3, i % 20, 1000 + i) for i in range(count)]
    assert published(reference, drawn, num_maps=2) == published(route_triton, drawn, num_maps=2)


def test_of_two_entries_for_one_expert_the_last_holds():
    assert 7 == published(route_triton, [(1, 2, 5), (0, 0, 1), (1, 2, 7)], num_maps=1)[0][1][2]
