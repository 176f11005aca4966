"""Random schedules on larger layers: up to twelve experts, two layers, any placement, failing copies."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from bank.explorer import num_under_way
from hotsplit.bank.rows import place
from hotsplit.bank.sim import SimBackend
from hotsplit.bank.swap import Swapper

NUM_MOVES = 400


@st.composite
def layer_rows(draw):
    """A layer that can swap: at least one hot and one cold expert, hot ones anywhere."""
    num_experts = draw(st.integers(2, 12))
    hot = draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=num_experts - 1, unique=True))
    return place(tuple(hot), num_experts=num_experts, spare=True, inclusive=draw(st.booleans()))


class Run:
    """One engine that launches steps while streams run in random order; the backend checks every state."""

    def __init__(self, layouts, *, seed, publish, side_streams, may_fail):
        self.random = Random(seed)
        self.backend = SimBackend(layouts, num_chunks=2)
        self.swapper = Swapper(self.backend, layouts=layouts, publish=publish, side_streams=side_streams)
        self.num_layers = len(layouts)
        self.fail_rate = 0.03 if may_fail else 0.0
        self.num_taken = self.num_published = self.num_dropped = 0

    def move(self):
        streams = self.backend.enabled()
        if streams and self.random.random() < 0.85:
            stream = self.random.choice(streams)
            fail = self.backend.is_copying(stream) and self.random.random() < self.fail_rate
            self.backend.advance(stream, fail=fail)
        elif self.backend.num_steps() < 3:
            self.update()
            self.tick()

    def update(self):
        for layer_id in range(self.num_layers):
            hot = self.swapper.hot_experts(layer_id)
            cold = [expert for expert in range(len(self.swapper.row_map(layer_id))) if expert not in hot]
            num_swaps = self.random.randint(0, min(2, len(hot), len(cold)))
            experts_in, experts_out = self.random.sample(cold, num_swaps), self.random.sample(sorted(hot), num_swaps)
            for expert_in, expert_out in zip(experts_in, experts_out, strict=True):
                self.num_taken += self.swapper.request(layer_id, expert_in=expert_in, expert_out=expert_out)

    def tick(self):
        result = self.swapper.tick()
        self.backend.launch_step()
        self.num_published += len(result.published)
        # A failure that leaves the spare row in place is a dropped swap; after publish 2 it is only a retry.
        self.num_dropped += sum(self.swapper.spare_row(swap.layer_id) is not None for swap, _ in result.failed)

    def settle(self):
        while not self.swapper.is_idle():
            self.tick()
            self.backend.drain(choose=self.random.choice)
        self.backend.drain()


@settings(max_examples=120, deadline=None)
@given(
    layouts=st.lists(layer_rows(), min_size=2, max_size=2),
    seed=st.integers(0, 2**32),
    publish=st.sampled_from(["done", "enqueued"]),
    side_streams=st.sampled_from([1, 2]),
    may_fail=st.booleans(),
)
def test_any_schedule_keeps_every_expert_and_completes_every_swap(layouts, seed, publish, side_streams, may_fail):
    run = Run(layouts, seed=seed, publish=publish, side_streams=side_streams, may_fail=may_fail and publish == "done")
    for _ in range(NUM_MOVES):
        run.move()
    assert run.num_taken == run.num_published + run.num_dropped + num_under_way(run.swapper)
    run.settle()
    assert run.num_taken == run.num_published + run.num_dropped
    assert 0 < run.num_taken
    for layer_id, layout in enumerate(layouts):
        assert run.backend.row_map(layer_id) == run.swapper.row_map(layer_id)
        assert layout.num_hot == len(run.swapper.hot_experts(layer_id))
