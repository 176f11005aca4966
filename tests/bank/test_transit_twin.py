"""The transit of a replay against the swapper that runs: the same visibility at every tick, whatever is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.rows import place
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Swapper
from hotsplit.plan.rebalance import Swap
from hotsplit.plan.transit import Transit

E, H, LAYERS = 6, 3, 2
UPDATES = st.lists(
    st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, H - 1), st.integers(0, E - H - 1)), max_size=4),
    min_size=1,
    max_size=14,
)


def apply(hot, moves):
    for move in moves:
        layer = hot[move.swap.layer_id]
        layer |= {move.swap.expert_in} if move.comes_in else set()
        layer -= {move.swap.expert_out} if move.goes_out else set()
    return tuple(move.swap for move in moves if move.goes_out)


@pytest.mark.parametrize("placement", ["inclusive", "exclusive"])
@given(updates=UPDATES)
def test_a_transit_shows_at_every_tick_what_the_swapper_shows_when_copies_are_done_by_the_next(placement, updates):
    inclusive = placement == "inclusive"
    layouts = [place(range(H), num_experts=E, spare=True, inclusive=inclusive) for _ in range(LAYERS)]
    backend = SimBackend(layouts)
    swapper, transit = Swapper(backend, layouts=layouts), Transit(placement=placement)
    hot = [set(range(H)) for _ in range(LAYERS)]
    for update in [*updates, *[[]] * 8]:
        published = swapper.tick().published
        backend.drain()
        assert published == apply(hot, transit.tick())
        assert [swapper.hot_experts(layer_id) for layer_id in range(LAYERS)] == hot
        assert swapper.busy() == transit.busy()
        taken = set()
        for layer_id, i, j in update:
            swap = Swap(
                layer_id=layer_id,
                expert_in=sorted(set(range(E)) - hot[layer_id])[min(j, E - len(hot[layer_id]) - 1)],
                expert_out=sorted(hot[layer_id])[i],
            )
            experts = {(layer_id, swap.expert_in), (layer_id, swap.expert_out)}
            if taken & experts:
                continue
            is_taken = swapper.request(layer_id, expert_in=swap.expert_in, expert_out=swap.expert_out)
            assert is_taken == transit.request(swap)
            taken |= experts if is_taken else set()
    assert swapper.is_idle()
    assert transit.is_idle()
