"""Swaps beside captured graphs: no replay may see half of one, and mutants of the protocol must be found.

One graph is one step: in each layer the route op, the experts kernel over rows in two memories, and a comparison with
what the unpermuted copy gave for the same tokens, bit by bit. It chooses its tokens by a counter in GPU memory, so
replays differ and nothing comes from the host. Between two replays the product's Swapper ticks over CudaSwapBackend:

    done        publishes what a query says is done: the rule of the product
    enqueued    publishes at once and leans on the waits alone, with copies that lag behind the steps

In the end every expert must lie, whole, in the row that its entry names, and the route op's counters must say what the
host knows: a replay is counted by the map that it was launched with.

Shapes: L layers, E experts, S draws, T tokens, K top-k, D model dim, P phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.checks import mutants
from hotsplit.bank.checks.bench import Bench, opened
from hotsplit.bank.checks.findings import Finding, Proof
from hotsplit.bank.checks.mutants import LaggingCalls, Mode
from hotsplit.bank.checks.rig import Rig, Traffic, draw_traffic, half_hot, layer_counters, random_experts
from hotsplit.bank.cuda_swaps import CudaSwapBackend, device_row_map
from hotsplit.bank.kernels.reference import TOTALS, ExpertRows
from hotsplit.bank.streams import StreamCalls
from hotsplit.bank.swap import Swapper
from hotsplit.errors import BankError

_NUM_LAYERS: Final = 2
_NUM_TOKENS: Final = 4
_DRAWS: Final = 16
_SWAPS_AT_ONCE: Final = 2
"""Of one layer and update: the second one follows at once, as it may in the product."""
_MANY: Final = 64
"""Copies that may be under way where nothing but the waits shall hold them back."""
_MOST_EXTRA_STEPS: Final = 5000
"""For the last swaps to come to their end."""


def check_replays(bench: Bench) -> Iterator[Finding]:
    """Replay a graph beside the product's swaps; no replay may notice.

    Args:
        bench: Has the location of cold rows.
    """
    bench.require_time(10)
    with opened(bench, _Replays(bench)) as machine:
        yield Proof(name="a tick during a capture is refused", holds=machine.is_refused_in_capture())
        for mode in mutants.MODES:
            bench.require_time(10)
            outcome = machine.run(mode, num_steps=bench.sizes.replays)
            yield from _right(mode, outcome)


def check_mutants(bench: Bench) -> Iterator[Finding]:
    """Replay it beside swaps that are wrong in one place each; some replay must notice.

    Args:
        bench: Has the location of cold rows.
    """
    bench.require_time(10)
    with opened(bench, _Replays(bench)) as machine:
        for mode in mutants.MUTANTS:
            bench.require_time(5)
            outcome = machine.run(mode, num_steps=bench.sizes.mutant_replays)
            detail = f"{outcome.num_wrong} of {outcome.num_outputs} outputs differ, {outcome.num_swaps} swaps"
            yield Proof(name=f"found: {mode.name}", holds=outcome.num_wrong > 0, detail=detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What came of one run."""

    num_outputs: int
    """Layers of all replays."""
    num_wrong: int
    """Of them, those whose output differed from the unpermuted copy's in any bit."""
    num_swaps: int
    """That were completed."""
    num_misplaced: int
    """Experts that do not lie, whole, where the last map says."""
    same_maps: bool
    """Whether the maps of the device, of the mirror and of the Swapper agree in the end."""
    counted: dict[str, int]
    """What the route op counted, all layers together."""
    known: dict[str, int]
    """The same by the host."""


def _right(mode: Mode, outcome: _Outcome) -> Iterator[Finding]:
    wrong = f"{outcome.num_wrong} of {outcome.num_outputs} outputs differ"
    yield Proof(name=f"{mode.name}: equal to the unpermuted copy", holds=outcome.num_wrong == 0, detail=wrong)
    swaps = f"{outcome.num_swaps} swaps"
    yield Proof(name=f"{mode.name}: swaps happened", holds=outcome.num_swaps > 0, detail=swaps)
    misplaced = f"{outcome.num_misplaced} experts are elsewhere"
    is_placed = outcome.num_misplaced == 0 and outcome.same_maps
    yield Proof(name=f"{mode.name}: in the end all experts are whole", holds=is_placed, detail=misplaced)
    counts = f"{outcome.counted}, by the host {outcome.known}"
    is_counted = outcome.counted == outcome.known
    yield Proof(name=f"{mode.name}: replays are counted by their own map", holds=is_counted, detail=counts)


class _Mirror:
    """The row maps as the host knows them, [L, E] (a RowMapMirror)."""

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows_LE = rows

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        self.rows_LE[layer_id, expert] = row


class _Replays:
    """Two layers, their graph, and all that a run starts anew."""

    def __init__(self, bench: Bench) -> None:
        size, device = bench.sizes.replay, bench.device
        self._bench, self._num_experts = bench, size.num_experts
        experts = [random_experts(bench, size, dtype=torch.bfloat16, seed=layer_id) for layer_id in range(_NUM_LAYERS)]
        self._layers = [half_hot(size.num_experts, seed=layer_id) for layer_id in range(_NUM_LAYERS)]
        self._traffic = [
            draw_traffic(bench, size, num_tokens=_NUM_TOKENS, draws=_DRAWS, seed=layer_id)
            for layer_id in range(_NUM_LAYERS)
        ]
        self._wanted_LSTD = [
            torch.stack([self._experts(one.as_rows(), traffic, draw=draw) for draw in range(_DRAWS)])
            for one, traffic in zip(experts, self._traffic, strict=True)
        ]
        self._ids_LS = [traffic.topk_ids.cpu().numpy() for traffic in self._traffic]
        self._first_LE = torch.tensor([layer.row_map for layer in self._layers])
        self._row_map_LE = self._first_LE.to(device.type, copy=True)
        self._draw, self._num_wrong = (bench.tensor(1, dtype=torch.int64).zero_() for _ in range(2))
        self._step = bench.tensor(2, dtype=torch.int64).zero_()
        self._counters = [layer_counters(bench, size.num_experts, step=self._step) for _ in self._layers]
        self._rig = Rig(bench, experts, layers=self._layers)
        try:
            self._graph = device.capture(self._replayed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the rows back; the device must be done with them."""
        self._rig.close()

    def is_refused_in_capture(self) -> bool:
        """Whether a backend refuses to be asked while a graph is captured, and the capture goes on."""
        backend = self._backend(mutants.MODES[0], calls=self._bench.device.calls, mirror=self._reset())
        scratch, refusals = self._bench.tensor(1, dtype=torch.int64).zero_(), []

        def work() -> None:
            scratch.add_(1)
            try:
                backend.query(None)
            except BankError:
                refusals.append(True)
            else:
                refusals.append(False)

        graph = self._bench.device.capture(work)
        is_refused, before = refusals[-1], int(scratch)
        graph.replay()
        return is_refused and int(scratch) == before + 1

    def run(self, mode: Mode, *, num_steps: int) -> _Outcome:
        """Replay the graph beside swaps.

        Args:
            mode: How to swap.
            num_steps: Replays; a few more follow until the last swap has ended.
        """
        mirror = self._reset()
        with ExitStack() as stack:
            calls = self._lagging(stack) if mode.lags else self._bench.device.calls
            backend = self._backend(mode, calls=calls, mirror=mirror)
            swapper = Swapper(backend, layouts=self._layers, publish=mode.rule)
            random, num_swaps, hits, step = np.random.default_rng(0), 0, 0, 0
            while step < num_steps or not swapper.is_idle():
                if step > num_steps + _MOST_EXTRA_STEPS:
                    raise BankError(f"swaps, {mode.name}", got="swaps that never end", wanted="a few steps more")
                if step < num_steps:
                    self._request(swapper, random=random)
                num_swaps += len(swapper.tick().published)
                hits += self._launch(step, mirror=mirror)
                step += 1
            self._bench.device.synchronise()
            backend.close()
        return self._outcome(swapper, mirror=mirror, num_steps=step, num_swaps=num_swaps, hits=hits)

    def _replayed(self) -> None:
        """What the graph does."""
        for layer_id, layer in enumerate(self._layers):
            traffic = self._traffic[layer_id]
            row_ids_TK = self._bench.device.kernels.route_and_count(
                self._drawn(traffic.topk_ids),
                row_map=self._row_map_LE[layer_id],
                is_padding=None,
                counters=self._counters[layer_id],
                first_cold=layer.first_cold,
            )
            found_TD = self._bench.device.kernels.experts(
                self._drawn(traffic.hidden_states),
                row_ids=row_ids_TK,
                topk_weights=self._drawn(traffic.topk_weights),
                rows=self._rig.expert_rows(layer_id),
            )
            wanted_TD = self._drawn(self._wanted_LSTD[layer_id])
            differs = (found_TD.view(torch.int16) != wanted_TD.view(torch.int16)).any()
            self._num_wrong.add_(differs.to(torch.int64))
        self._draw.add_(1).remainder_(_DRAWS)

    def _drawn(self, all_S: torch.Tensor) -> torch.Tensor:
        """The draw whose turn it is."""
        return all_S.index_select(0, self._draw)[0]

    def _experts(self, rows: ExpertRows, traffic: Traffic, *, draw: int) -> torch.Tensor:
        """The unpermuted layer: row ids are expert ids."""
        return self._bench.device.kernels.experts(
            traffic.hidden_states[draw],
            row_ids=traffic.topk_ids[draw],
            topk_weights=traffic.topk_weights[draw],
            rows=rows,
        )

    def _reset(self) -> _Mirror:
        """Everything as it was at first."""
        self._bench.device.synchronise()
        self._rig.load()
        self._row_map_LE.copy_(self._first_LE)
        for tensor in (self._draw, self._num_wrong):
            tensor.zero_()
        for counters in self._counters:
            for tensor in (counters.pairs, counters.totals, counters.stamps):
                tensor.zero_()
        self._bench.device.synchronise()
        return _Mirror(self._first_LE.numpy().copy())

    def _backend(self, mode: Mode, *, calls: StreamCalls, mirror: _Mirror) -> CudaSwapBackend:
        return mode.backend(
            self._rig,
            streams=self._bench.device.streams,
            driver=calls,
            row_maps=[device_row_map(self._row_map_LE)],
            mirror=mirror,
            max_copies=1 if mode.rule == "done" else _MANY,
        )

    def _lagging(self, stack: ExitStack) -> LaggingCalls:
        lag_bytes = self._bench.sizes.lag_bytes
        source = stack.enter_context(self._bench.device.pinned(lag_bytes))
        target = self._bench.tensor(lag_bytes, dtype=torch.uint8)
        return LaggingCalls(self._bench.device.calls, source=source, target=target)

    def _request(self, swapper: Swapper, *, random: np.random.Generator) -> None:
        """In every layer that has nothing to do, cold experts for hot ones, at random."""
        for layer_id in sorted(set(range(_NUM_LAYERS)) - swapper.busy()):
            hot = sorted(swapper.hot_experts(layer_id))
            cold = sorted(set(range(self._num_experts)) - set(hot))
            ins, outs = (random.choice(among, _SWAPS_AT_ONCE, replace=False).tolist() for among in (cold, hot))
            for expert_in, expert_out in zip(ins, outs, strict=True):
                swapper.request(layer_id, expert_in=expert_in, expert_out=expert_out)

    def _launch(self, step: int, *, mirror: _Mirror) -> int:
        """Launch one step; the hits that it will count."""

        def work() -> None:
            self._bench.device.kernels.begin_step(self._step, number=step + 1, phase=0)
            self._graph.replay()

        self._bench.device.launch(work)
        return sum(
            int((mirror.rows_LE[layer_id][ids_S[step % _DRAWS]] < layer.first_cold).sum())
            for layer_id, (layer, ids_S) in enumerate(zip(self._layers, self._ids_LS, strict=True))
        )

    def _outcome(self, swapper: Swapper, *, mirror: _Mirror, num_steps: int, num_swaps: int, hits: int) -> _Outcome:
        totals = torch.stack([counters.totals[0] for counters in self._counters]).sum(0).tolist()
        counted = dict(zip(TOTALS, totals, strict=True))
        pairs = sum(int(counters.pairs.sum()) for counters in self._counters)
        outputs = num_steps * _NUM_LAYERS
        maps = [swapper.row_map(layer_id) for layer_id in range(_NUM_LAYERS)]
        tokens = outputs * _NUM_TOKENS
        return _Outcome(
            num_outputs=outputs,
            num_wrong=int(self._num_wrong),
            num_swaps=num_swaps,
            num_misplaced=sum(self._rig.num_wrong(layer_id, row_map=maps[layer_id]) for layer_id in range(_NUM_LAYERS)),
            same_maps=self._row_map_LE.tolist() == [list(row_map) for row_map in maps] == mirror.rows_LE.tolist(),
            counted={"pairs": pairs, "tokens": counted["tokens"], "hits": counted["hits"]},
            known={"pairs": tokens * self._bench.sizes.replay.top_k, "tokens": tokens, "hits": hits},
        )
