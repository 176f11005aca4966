"""The route op: rows instead of experts, and counts that agree with counting by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.kernels import reference
from hotsplit.bank.route import Router
from hotsplit.bank.rows import place

E = 5
SENTINELS = (-1, E, E + 7, -100)


def router_of(hot=((2, 0), (1,)), *, row_bytes=(10, 1000), inclusive=True, **options):
    layers = [place(experts, num_experts=E, spare=True, inclusive=inclusive) for experts in hot]
    return Router(layers, row_bytes=row_bytes, **options)


def route(router, layer_id, ids, *, padding=None, phase="decode", step=1):
    is_padding = None if padding is None else torch.tensor(padding)
    return router.route(layer_id, torch.tensor(ids), is_padding=is_padding, phase=phase, step=step)


@st.composite
def steps(draw):
    """Several steps: (phase, padding mask or None, ids per layer [T, K])."""
    ids = st.sampled_from((*range(E), *SENTINELS))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        num_tokens, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        tokens = st.lists(st.lists(ids, min_size=top_k, max_size=top_k), min_size=num_tokens, max_size=num_tokens)
        mask = draw(st.none() | st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
        found.append((draw(st.sampled_from(["decode", "prefill"])), mask, [draw(tokens), draw(tokens)]))
    return found


@given(steps())
def test_all_counters_agree_with_counting_pair_by_pair(played):
    router = router_of()
    counts, hits, tokens, hot_bytes, cold_bytes = Counter(), Counter(), Counter(), Counter(), Counter()
    hot = [{2, 0}, {1}]
    for number, (phase, mask, ids) in enumerate(played, 1):
        for layer_id, layer_ids in enumerate(ids):
            route(router, layer_id, layer_ids, padding=mask, phase=phase, step=number)
            kept = [token for i, token in enumerate(layer_ids) if mask is None or not mask[i]]
            pairs = [expert for token in kept for expert in token if 0 <= expert < E]
            counts.update((phase, layer_id, expert) for expert in pairs)
            hits[phase] += sum(expert in hot[layer_id] for expert in pairs)
            for expert in set(pairs):
                (hot_bytes if expert in hot[layer_id] else cold_bytes)[phase] += (10, 1000)[layer_id]
        tokens[phase] += len(kept)
        router.flush()
    counters = router.counters
    assert len(played) == counters.steps
    for phase in ("decode", "prefill"):
        assert [[counts[phase, n, e] for e in range(E)] for n in range(2)] == counters.counts[phase].tolist()
        assert hits[phase] == counters.hits[phase]
        assert tokens[phase] == counters.tokens[phase]
        assert hot_bytes[phase] == counters.touched_hot_bytes[phase]
        assert cold_bytes[phase] == counters.touched_cold_bytes[phase]


@given(steps())
def test_rows_are_the_map_of_the_ids_and_sentinels_stay(played):
    router = router_of()
    for phase, _, ids in played:
        for layer_id, layer_ids in enumerate(ids):
            row_map = router.row_map[layer_id].tolist()
            expected = [[row_map[e] if 0 <= e < E else e for e in token] for token in layer_ids]
            assert expected == route(router, layer_id, layer_ids, phase=phase).tolist()


def test_padding_goes_to_a_real_tokens_rows_where_it_may_be_redirected():
    router = router_of()
    rows = route(router, 0, [[4, 3], [2, 0], [1, 1]], padding=[True, False, True])
    assert [[0, 1], [0, 1], [0, 1]] == rows.tolist()


def test_padding_alone_goes_to_row_zero():
    assert [[0, 0], [0, 0]] == route(router_of(), 0, [[4, 3], [1, 1]], padding=[True, True]).tolist()


def test_padding_without_a_row_stays_without_one():
    assert [[-1, -1], [0, 0]] == route(router_of(), 0, [[-1, -1], [1, 1]], padding=[True, True]).tolist()


def test_padding_keeps_its_rows_where_it_must_equal_the_stock_engine():
    router = router_of(redirect_padding=False)
    row_map = router.row_map[0].tolist()
    assert [[row_map[4]], [row_map[2]]] == route(router, 0, [[4], [2]], padding=[True, False]).tolist()
    router.flush()
    assert [0, 0, 1, 0, 0] == router.counters.counts["decode"][0].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_any_integer_type_of_ids_is_routed_and_counted(dtype):
    router = router_of()
    ids = torch.tensor([[2, -1], [E, 1]], dtype=dtype)
    rows = router.route(0, ids, is_padding=None, phase="decode", step=1)
    assert (torch.int64, [[0, -1], [E, router.row_map[0, 1].item()]]) == (rows.dtype, rows.tolist())
    router.flush()
    assert [0, 1, 1, 0, 0] == router.counters.counts["decode"][0].tolist()


def test_hits_are_those_of_the_map_that_routed():
    router = router_of()
    route(router, 0, [[2, 4]])
    router.flush()
    router.publish(0, expert=4, row=2)
    router.publish(0, expert=2, row=3 + 2)
    assert 1 == router.counters.hits["decode"]
    route(router, 0, [[2, 4], [4, 4]])
    router.flush()
    assert 1 + 3 == router.counters.hits["decode"]
    assert [[True, False, False, False, True], [False, True, False, False, False]] == router.hot_mask().tolist()


def test_an_expert_in_the_spare_row_is_hot():
    router = router_of()
    assert not router.hot_mask()[0, 4]
    router.publish(0, expert=4, row=2)  # rows 0 and 1 are hot, 2 is the spare one
    assert router.hot_mask()[0, 4]


def test_a_step_touches_an_expert_once_however_often_it_is_routed():
    router = router_of()
    route(router, 0, [[2, 1], [2, 1], [2, 3]])
    router.flush()
    assert (10, 20) == (router.counters.touched_hot_bytes["decode"], router.counters.touched_cold_bytes["decode"])
    route(router, 0, [[2, 1]])
    router.flush()
    assert (20, 30) == (router.counters.touched_hot_bytes["decode"], router.counters.touched_cold_bytes["decode"])


def test_a_publish_writes_into_the_same_tensor():
    router = router_of()
    address = router.row_map.data_ptr()
    router.publish(1, expert=3, row=1)
    assert (address, 1) == (router.row_map.data_ptr(), router.row_map[1, 3].item())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(ids=st.lists(st.integers(-1, E - 1), min_size=1, max_size=8))
def test_remapping_is_the_reference_route_in_the_type_of_the_ids(dtype, ids):
    router = router_of()
    ids_TK = torch.tensor([ids], dtype=dtype)
    rows_TK = router.remap(1, ids_TK)
    assert (dtype, reference.route(ids_TK, row_map=router.row_map[1]).tolist()) == (rows_TK.dtype, rows_TK.tolist())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_publish_reaches_the_maps_of_both_types(dtype):
    router = router_of()
    before = router.remap(1, torch.arange(E, dtype=dtype)).tolist()
    router.publish(1, expert=3, row=1)
    after = router.remap(1, torch.arange(E, dtype=dtype)).tolist()
    assert [3] == [expert for expert in range(E) if before[expert] != after[expert]]
    assert (1, router.row_map[1].tolist()) == (after[3], after)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_remapping_knows_fixed_rows_and_refuses_ids_behind_them(dtype):
    layers = [place(hot, num_experts=E, spare=True, inclusive=False, fixed=2) for hot in ((2, 0), (1,))]
    router = Router(layers, row_bytes=(10, 1000))
    assert [[2, 3, -1], [1, 2, -1]] == [
        router.remap(layer_id, torch.tensor([E, E + 1, -1], dtype=dtype)).tolist() for layer_id in (0, 1)
    ]
    assert (2, E) == tuple(router.row_map.shape)
    with pytest.raises(IndexError):
        router.remap(0, torch.tensor([E + 3], dtype=dtype))


def test_stashed_ids_are_counted_as_routed_ones_are():
    router, other = router_of(), router_of()
    ids, mask = torch.tensor([[2, 4], [1, -1], [3, 3]]), torch.tensor([False, True, False])
    for layer_id in (0, 1):
        router.stash(layer_id, ids, is_padding=mask, phase="prefill", step=1)
        other.route(layer_id, ids, is_padding=mask, phase="prefill", step=1)
        assert 0 == router.counters.steps
    router.flush()
    other.flush()
    assert str(other.counters) == str(router.counters)
    assert [0, 0, 1, 2, 1] == router.counters.counts["prefill"][0].tolist()


def test_discarded_ids_are_not_counted_and_later_ones_are():
    router = router_of()
    router.stash(0, torch.tensor([[2, 4]]), is_padding=None, phase="decode", step=1)
    router.discard()
    router.flush()
    assert 0 == router.counters.steps
    router.stash(0, torch.tensor([[1, 1]]), is_padding=None, phase="decode", step=2)
    router.flush()
    assert (1, [0, 2, 0, 0, 0]) == (router.counters.steps, router.counters.counts["decode"][0].tolist())


def test_flushing_without_a_step_counts_nothing():
    router = router_of()
    router.flush()
    route(router, 0, [[1]])
    router.flush()
    router.flush()
    assert (1, 1) == (router.counters.steps, router.counters.tokens["decode"])


def test_a_reading_of_the_counters_does_not_grow_on():
    router = router_of()
    before = router.counters.copy()
    route(router, 0, [[1, 2]])
    router.flush()
    assert (0, 0, 0, 0) == (
        before.steps,
        before.tokens["decode"],
        before.hits["decode"],
        int(before.counts["decode"].sum()),
    )


def test_observers_see_every_layer_of_a_step_once():
    router = router_of()
    seen = []
    router.observers.append(seen.append)
    route(router, 0, [[1, 2], [3, 4]], padding=[True, False], phase="prefill", step=7)
    route(router, 1, [[0, 1], [2, 3]], padding=[True, False], phase="prefill", step=7)
    router.flush()
    router.flush()
    (step,) = seen
    assert (7, "prefill", (0, 1), [True, False]) == (
        step.step,
        step.phase,
        step.layer_ids,
        step.is_padding.tolist(),
    )
    assert [[[1, 2], [3, 4]], [[0, 1], [2, 3]]] == [ids.tolist() for ids in step.topk_ids]


def test_counters_are_64_bit():
    router = router_of()
    router.counters.counts["decode"][0, 1] = 2**40
    route(router, 0, [[1]])
    router.flush()
    assert (np.int64, 2**40 + 1) == (router.counters.counts["decode"].dtype, router.counters.counts["decode"][0, 1])


@given(st.permutations(range(E)), st.lists(st.integers(-2, E + 2), min_size=1, max_size=8))
def test_the_reference_route_inverts_with_the_inverse_map(row_map, ids):
    forth = torch.tensor(row_map)
    back = torch.argsort(forth)
    ids_TK = torch.tensor([ids])
    rows_TK = reference.route(ids_TK, row_map=forth)
    assert ids == reference.route(rows_TK, row_map=back).tolist()[0]
