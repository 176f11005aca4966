"""What the product adds to a step: the route op in every layer, a publish between two steps, a swap that is under way.

    route      nodes of a graph and time, of as many layers as a model has, against a step of 20 ms
    publish    CudaSwapBackend's write of one entry, on the device and on the host
    swaps      steps per second of one and the same decode step, with and without rows on their way

Swaps exchange two experts of each layer that no token asks for, so the step reads the same bytes with them and without,
and what it loses is what their copies take from it.

Shapes: L layers, E experts, T tokens, K top-k.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

import torch

from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.device import Graph, median_s
from hotsplit.bank.checks.findings import Fact, Figure, Finding, Goal, Proof
from hotsplit.bank.checks.rig import Rig, draw_traffic, half_hot, layer_counters, random_experts
from hotsplit.bank.cuda_swaps import CudaSwapBackend, device_row_map
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.rows import LayerRows, place
from hotsplit.bank.swap import Swapper

STEP_S: Final = 20e-3
"""Of the step that costs are held against."""
PUBLISH_S: Final = 5e-6
"""A publish may take so long."""
_AT_MOST: Final = Goal(most=1)
_SPEED: Final = Goal(least=0.98)
_NUM_TOKENS: Final = 4
_ROUNDS: Final = 3
_HOLD_COPIES: Final = 8
"""Of GPU memory, in front of what is measured: the host gets ahead of the device meanwhile."""
_NEVER: Final = 2
"""Experts of each layer that no token asks for: one hot, one cold, and they change places."""


def check_route(bench: Bench) -> Iterator[Finding]:
    """Capture the route ops of a whole model, and replay them.

    Args:
        bench: Whose kernel routes.
    """
    size, num_layers, device = bench.sizes.route, bench.sizes.route_layers, bench.device
    bench.require_time(5)
    layers = [half_hot(size.num_experts, seed=layer_id) for layer_id in range(num_layers)]
    row_map_LE = torch.tensor([layer.row_map for layer in layers]).to(device.type)
    step = bench.tensor(2, dtype=torch.int64).zero_()
    counters = [layer_counters(bench, size.num_experts, step=step) for _ in layers]
    ids_TK = draw_traffic(bench, size, num_tokens=_NUM_TOKENS, draws=1, seed=0).topk_ids[0]
    device.kernels.begin_step(step, number=1, phase=0)

    def work() -> None:
        for layer_id, layer in enumerate(layers):
            device.kernels.route_and_count(
                ids_TK,
                row_map=row_map_LE[layer_id],
                is_padding=None,
                counters=counters[layer_id],
                first_cold=layer.first_cold,
            )

    graph = device.capture(work)
    yield _nodes_per_layer(graph, num_layers=num_layers)
    seconds = median_s(device, graph.replay, repeats=bench.sizes.repeats)
    yield Figure(name="route op, one layer", value=seconds / num_layers, unit="s")
    yield Figure(
        name=f"route ops of {num_layers} layers, part of a step of {STEP_S * 1e3:g} ms",
        value=seconds / STEP_S,
        unit="ratio",
        bound=0.003,
        bound_is="the goal",
        goal=_AT_MOST,
    )


def check_publish(bench: Bench) -> Iterator[Finding]:
    """Write entries of a row map, one behind the other.

    Args:
        bench: Whose streams and driver publish.
    """
    device, num_experts, number = bench.device, bench.sizes.route.num_experts, bench.sizes.publishes
    bench.require_time(2)
    row_map_LE = bench.tensor(1, num_experts, dtype=torch.int64).zero_()
    backend = CudaSwapBackend(
        _NoRows(),
        streams=device.streams,
        driver=device.calls,
        row_maps=[device_row_map(row_map_LE)],
        mirror=_NoMirror(),
    )
    held, other = (bench.tensor(bench.sizes.hbm_bytes, dtype=torch.uint8) for _ in range(2))
    host_s = []

    def publish() -> None:
        start = time.perf_counter()
        for nth in range(number):
            backend.publish(0, expert=nth % num_experts, row=nth)
        host_s.append(time.perf_counter() - start)

    publish()
    device.synchronise()
    on_device = []
    for _ in range(bench.sizes.repeats):
        for _ in range(_HOLD_COPIES):
            held.copy_(other)
        first = device.stamp("compute")
        publish()
        last = device.stamp("compute")
        device.synchronise()
        on_device.append(device.elapsed_s(first, last))
    wanted = [max(range(expert, number, num_experts), default=0) for expert in range(num_experts)]
    yield Proof(name="published entries are there", holds=row_map_LE[0].tolist() == wanted)
    name = "publish of one entry, on the device"
    value = statistics.median(on_device) / number
    yield Figure(name=name, value=value, unit="s", bound=PUBLISH_S, bound_is="the goal", goal=_AT_MOST)
    yield Figure(name="publish of one entry, on the host", value=statistics.median(host_s) / number, unit="s")


def check_swaps_in_flight(bench: Bench) -> Iterator[Finding]:
    """Run the same decode step with swaps and without, in turns.

    Args:
        bench: Has the location of cold rows.
    """
    bench.require_time(20)
    with opened(bench, _DecodeStep(bench)) as step:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_ROUNDS):
            for swaps, measured in rates.items():
                measured.append(step.steps_per_s(swaps=swaps))
        without, beside = (statistics.median(rates[swaps]) for swaps in (False, True))
        yield Figure(name="decode step without swaps", value=1 / without, unit="s")
        yield Figure(
            name="decode with swaps in flight",
            value=beside,
            unit="steps/s",
            bound=without,
            bound_is="the same without swaps, in turns",
            goal=_SPEED,
        )
        yield Proof(name="swaps were in flight", holds=step.num_swaps > 0, detail=f"{step.num_swaps} swaps")
        yield Fact(name="bytes copied per step with swaps", value=step.copied_bytes_per_step)


def _nodes_per_layer(graph: Graph, *, num_layers: int) -> Figure:
    num_nodes = graph.num_nodes
    return Figure(
        name="graph nodes of the route op, one layer",
        value=None if num_nodes is None else num_nodes / num_layers,
        unit="nodes",
        bound=1,
        bound_is="the goal",
        goal=_AT_MOST,
        reason="this graph has no nodes to count" if num_nodes is None else "",
    )


def _nearly_hot(num_experts: int) -> LayerRows:
    """A layer in which expert 0 is hot, expert 1 is cold, and so are a few of those that tokens ask for."""
    first_cold = num_experts - max(1, num_experts // 8)
    hot = [expert for expert in range(first_cold) if expert != 1]
    return place(hot, num_experts=num_experts, spare=True, inclusive=False)


class _NoRows:
    """Of a backend that publishes alone."""

    def tensors(self, layer_id: int) -> list[RowTensor]:
        return []


class _NoMirror:
    """Nobody listens."""

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        pass


class _DecodeStep:
    """A step of as many layers as a model has, over the rows of a few, and swaps that change none of its bytes."""

    def __init__(self, bench: Bench) -> None:
        size, self._bench = bench.sizes.layer, bench
        self._layers = [_nearly_hot(size.num_experts) for _ in range(bench.sizes.step_layers)]
        experts = random_experts(bench, size, dtype=torch.bfloat16, seed=0)
        self._row_bytes = experts.row_bytes
        self._rig = Rig(bench, [experts] * len(self._layers), layers=self._layers)
        self._row_map_LE = torch.tensor([layer.row_map for layer in self._layers]).to(bench.device.type)
        self._swapper = Swapper(
            CudaSwapBackend(
                self._rig,
                streams=bench.device.streams,
                driver=bench.device.calls,
                row_maps=[device_row_map(self._row_map_LE)],
                mirror=_NoMirror(),
            ),
            layouts=self._layers,
        )
        self.num_swaps = 0
        self._num_copies, self._num_steps = 0, 0
        try:
            self._graph = self._captured()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._rig.close()

    @property
    def copied_bytes_per_step(self) -> float:
        """Of the steps with swaps."""
        return self._num_copies * self._row_bytes / max(1, self._num_steps)

    def steps_per_s(self, *, swaps: bool) -> float:
        """Speed of some steps; with swaps, the first of them starts before the clock does."""
        device, num_steps = self._bench.device, self._bench.sizes.steps
        self._finish()
        device.launch(self._graph.replay)
        self._tick(swaps=swaps)
        start = device.stamp("compute")
        for _ in range(num_steps):
            self._tick(swaps=swaps)
            device.launch(self._graph.replay)
        end = device.stamp("compute")
        device.synchronise()
        self._num_steps += num_steps * swaps
        return num_steps / device.elapsed_s(start, end)

    def _tick(self, *, swaps: bool) -> None:
        for layer_id in range(len(self._layers) if swaps else 0):
            if layer_id not in self._swapper.busy():
                row_map, first_cold = self._swapper.row_map(layer_id), self._layers[layer_id].first_cold
                cold, hot = sorted(range(_NEVER), key=lambda expert: row_map[expert] < first_cold)
                self._swapper.request(layer_id, expert_in=cold, expert_out=hot)
        result = self._swapper.tick()
        self.num_swaps += len(result.published)
        self._num_copies += len(result.copied_layers)

    def _finish(self) -> None:
        """Let the last swaps end."""
        while not self._swapper.is_idle():
            self.num_swaps += len(self._swapper.tick().published)
            self._bench.device.synchronise()

    def _captured(self) -> Graph:
        sizes, device = self._bench.sizes, self._bench.device
        wanted_E = torch.full((sizes.layer.num_experts,), 1.0)
        row_map_E = torch.tensor(self._layers[0].row_map)
        is_cold_E = row_map_E >= self._layers[0].first_cold
        # Of equal chances, as much less for a cold expert as makes the wanted part of the pairs cold.
        num_cold, num_hot = int(is_cold_E[_NEVER:].sum()), int((~is_cold_E[_NEVER:]).sum())
        wanted_E[is_cold_E] = sizes.step_cold_ratio * num_hot / num_cold
        wanted_E[:_NEVER] = 0
        traffic = draw_traffic(
            self._bench, sizes.layer, num_tokens=_NUM_TOKENS, draws=sizes.route_layers, seed=4, wanted=wanted_E
        )

        def work() -> None:
            for call in range(sizes.route_layers):
                layer_id = call % len(self._layers)
                device.kernels.experts(
                    traffic.hidden_states[call],
                    row_ids=self._row_map_LE[layer_id][traffic.topk_ids[call]],
                    topk_weights=traffic.topk_weights[call],
                    rows=self._rig.expert_rows(layer_id),
                )

        return device.capture(work)
