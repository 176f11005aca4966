"""The least recently used policy, by hand and against a list that is searched from its end."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.plan.lru import as_replayed, lru, sample_layers
from hotsplit.plan.replay import Steps

E = 6


def steps_of_ids(ids):
    ids = np.asarray(ids)
    return Steps(experts=ids, starts=np.arange(len(ids) + 1), is_decode=np.ones(len(ids), dtype=bool), num_experts=E)


def test_hits_are_held_against_what_was_there_when_the_step_began():
    steps = steps_of_ids([[[0, 2]], [[2, 3]], [[0, 3]]])
    hot = np.array([[True, True, False, False, False, False]])
    result = lru(steps, hot=hot, order=np.array([[9.0, 1, 0, 0, 0, 0]]), layer_ids=(0,))
    # 0 hits, 2 comes for 1; 2 hits, 3 comes for 0; 0 comes for 2, 3 hits.
    assert [1, 1, 1] == result.hits.tolist()
    assert [1, 1, 1] == result.moved_rows.tolist()


def test_before_anything_is_used_the_least_wanted_of_the_plan_goes_first():
    steps = steps_of_ids([[[5]], [[0]], [[1]]])
    hot = np.array([[True, True, False, False, False, False]])
    assert [0, 1, 0] == lru(steps, hot=hot, order=np.array([[9.0, 1, 0, 0, 0, 0]]), layer_ids=(0,)).hits.tolist()
    assert [0, 0, 0] == lru(steps, hot=hot, order=np.array([[1.0, 9, 0, 0, 0, 0]]), layer_ids=(0,)).hits.tolist()


@given(st.lists(st.permutations(range(E)), min_size=1, max_size=25), st.integers(1, E))
def test_what_is_hot_are_always_the_last_used(orders, room):
    ids = np.array([[order[:2]] for order in orders])
    hot = np.arange(E)[None] < room
    result = lru(steps_of_ids(ids), hot=hot, order=np.zeros((1, E)), layer_ids=(0,))
    used, hits = list(range(room)), []
    for token in ids[:, 0].tolist():
        held = list(dict.fromkeys(reversed(used)))[:room]
        hits.append(sum(expert in held for expert in token))
        used += token
    assert hits == result.hits.tolist()
    assert [2 - hit for hit in hits] == result.moved_rows.tolist()


def test_layers_are_sampled_evenly_where_all_would_take_too_long():
    steps = steps_of_ids(np.zeros((10, 7, 2), dtype=int))
    assert (0, 1, 2, 3, 4, 5, 6) == sample_layers(steps)
    assert (0, 3, 6) == sample_layers(steps, max_pairs=60)
    assert (0,) == sample_layers(steps, max_pairs=1)


def test_windows_of_the_result_add_up_to_the_whole():
    random = np.random.default_rng(3)
    steps = steps_of_ids(random.integers(0, E, (50, 2, 1)))
    hot = np.arange(E) < np.array([[2], [3]])
    result = lru(steps, hot=hot, order=np.zeros((2, E)), layer_ids=(0, 1))
    found = as_replayed(result, steps=steps, row_bytes=100.0, window_steps=20)
    assert [20, 20, 10] == [part.steps for part in found.parts]
    assert found.moved_bytes == sum(part.moved_bytes for part in found.parts) == 100 * int(result.moved_rows.sum())
    assert found.hits == round(sum(part.hit_rate * part.steps * 2 for part in found.parts))
