"""The router that counts on the device tells what the router that counts on the host tells, a few steps later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotsplit.bank import device_router
from hotsplit.bank.device_router import DeviceRouter
from hotsplit.bank.kernels import reference
from hotsplit.bank.route import PHASES, Router
from hotsplit.bank.rows import place

NUM_EXPERTS, TOP_K, ROW_BYTES = 6, 2, (100, 7)
CPU = torch.device("cpu")


def layers(fixed=0):
    return [place(hot, num_experts=NUM_EXPERTS, spare=True, inclusive=False, fixed=fixed) for hot in ((0, 1), (5, 2))]


def on_device(rows, **options):
    return DeviceRouter(rows, row_bytes=ROW_BYTES, device=CPU, kernels=reference, **options)


def publish(routers, layer_id, *, expert, row):
    """In both routers, and, as the swap backend does it, in the maps on the device."""
    for router in routers:
        router.publish(layer_id, expert=expert, row=row)
    reference.publish(list(routers[-1].device_maps.values()), entries=[(layer_id, expert, row)])


def random_step(routers, *, generator, number):
    """One step of random size, padding and phase through all routers; whether they gave the same rows."""
    phase = PHASES[int(generator.integers(2))]
    num_tokens = int(generator.integers(1, 9))
    mask = torch.from_numpy(generator.random(num_tokens + 3) < 0.3)
    for router in routers:
        router.begin_step(number, phase=phase)
    same = True
    for layer_id in range(2):
        ids = torch.from_numpy(generator.integers(-1, NUM_EXPERTS, size=(num_tokens, TOP_K)))
        rows = [router.serve(layer_id, ids, is_padding=mask) for router in routers]
        same &= torch.equal(rows[0], rows[1])
    for router in routers:
        router.end_step()
    return same


def told(counters):
    """All numbers, comparable."""
    counts = {phase: counts.tolist() for phase, counts in counters.counts.items()}
    return (
        counts,
        counters.tokens,
        counters.hits,
        counters.touched_hot_bytes,
        counters.touched_cold_bytes,
        counters.steps,
    )


@pytest.mark.parametrize("seed", range(8))
def test_it_counts_and_maps_as_the_router_of_the_host_does_while_rows_move(seed):
    generator = np.random.default_rng(seed)
    routers = [Router(layers(), row_bytes=ROW_BYTES), on_device(layers())]
    for number in range(1, 40):
        assert random_step(routers, generator=generator, number=number)
        if number % 5 == 0:
            layer_id, expert = int(generator.integers(2)), int(generator.integers(NUM_EXPERTS))
            publish(routers, layer_id, expert=expert, row=int(generator.integers(NUM_EXPERTS + 1)))
    routers[1].settle()
    assert told(routers[0].counters) == told(routers[1].counters)
    assert 0 < sum(routers[0].counters.hits.values())
    assert np.array_equal(routers[0].hot_mask(), routers[1].hot_mask())


def test_a_reading_comes_once_in_so_many_steps_and_settling_reads_the_rest():
    router = on_device(layers(), read_every_steps=4)
    seen = []
    for number in range(1, 11):
        router.begin_step(number, phase="decode")
        router.serve(0, torch.tensor([[0, 3]]), is_padding=None)
        router.end_step()
        seen.append(router.counters.steps)
    assert [0, 0, 0, 4, 4, 4, 4, 8, 8, 8] == seen
    router.settle()
    assert (10, 10) == (router.counters.steps, router.counters.tokens["decode"])


def test_a_reading_that_has_not_arrived_is_not_waited_for(monkeypatch):
    class Event:
        has_arrived = False

        def query(self):
            return self.has_arrived

    event = Event()
    router = on_device(layers())
    read = router._read

    def under_way():
        reading = read()
        return device_router._Reading(
            pairs=reading.pairs, totals=reading.totals, num_steps=reading.num_steps, event=event
        )

    monkeypatch.setattr(router, "_read", under_way)
    for number in (1, 2):
        router.begin_step(number, phase="decode")
        router.serve(0, torch.tensor([[0, 3]]), is_padding=None)
        router.end_step()
    assert 0 == router.counters.steps
    event.has_arrived = True
    router.flush()
    assert (1, 1) == (router.counters.steps, router.counters.tokens["decode"]), "as of when it was read"


def test_what_runs_between_steps_is_mapped_and_not_counted():
    router = on_device(layers())
    before = router.serve(0, torch.tensor([[0, 3]]), is_padding=None).tolist()
    router.begin_step(1, phase="prefill")
    router.end_step()
    assert [[0, 4]] == before == router.serve(0, torch.tensor([[0, 3]]), is_padding=None).tolist()
    router.settle()
    assert 0 == sum(router.counters.tokens.values())


def test_a_step_that_broke_off_counts_nothing_more():
    router = on_device(layers())
    router.begin_step(1, phase="decode")
    router.abandon_step()
    router.serve(0, torch.tensor([[0, 3]]), is_padding=None)
    router.settle()
    assert 0 == router.counters.tokens["decode"]


def test_ids_of_fixed_rows_are_mapped_and_never_counted():
    router = on_device(layers(fixed=1))
    router.begin_step(1, phase="decode")
    rows = router.serve(0, torch.tensor([[0, NUM_EXPERTS]], dtype=torch.int32), is_padding=None)
    router.end_step()
    router.settle()
    assert ([[0, 2]], torch.int32) == (rows.tolist(), rows.dtype)
    assert 1 == router.counters.counts["decode"].sum()


def test_the_maps_on_the_device_are_not_the_hosts_to_change():
    router = on_device(layers())
    router.publish(0, expert=3, row=2)
    assert 2 == router.row_map[0, 3]
    assert [[4]] == router.serve(0, torch.tensor([[3]]), is_padding=None).tolist(), "the swap backend has not written"


class OnGpu(torch.Tensor):
    """Counters that say they lie on a GPU."""

    is_cuda = True


@pytest.fixture
def gpu_calls(monkeypatch):
    """What is asked of the current stream; "capturing" in it while a graph is captured."""
    calls = []

    class Stream:
        def record_event(self, event=None):
            calls.append("record")
            return event or "the end of a step"

        def wait_event(self, event):
            calls.append(f"wait for {event}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "capturing" in calls)
    return calls


def on_gpu():
    router = on_device(layers())
    router._pairs = router._pairs.as_subclass(OnGpu)
    return router


def test_settling_from_any_thread_waits_for_the_stream_of_the_steps(gpu_calls):
    router = on_gpu()
    router.begin_step(1, phase="decode")
    router.abandon_step()
    router.settle()
    assert ["record", "wait for the end of a step"] == gpu_calls


def test_nothing_is_read_while_a_graph_is_captured(gpu_calls):
    router = on_gpu()
    gpu_calls.append("capturing")
    router.begin_step(1, phase="decode")
    router.serve(0, torch.tensor([[0, 3]]), is_padding=None)
    router.end_step()
    router.flush()
    assert (0, ["capturing"]) == (router.counters.steps, gpu_calls)
    gpu_calls.clear()
    router.flush()
    assert (1, 1) == (router.counters.steps, router.counters.tokens["decode"])
