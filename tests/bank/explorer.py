"""Exhaustive exploration of the real Swapper on the simulated backend.

A state is a Swapper with its backend. From it, either a stream does its next piece of work (or, while failures are
left, the copy that stands there fails), or the host makes an update (any legal one, or none), ticks, and launches a
step; the host runs at most `launch_ahead` unfinished steps ahead. Events are known by what they still can do, so equal
futures are one state and the search *closes*: it covers runs of any length, with any number of swaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Literal

from hotsplit.bank.rows import LayerRows, place
from hotsplit.bank.sim import SimBackend, SimViolation
from hotsplit.bank.swap import PublishRule, Stream, Swapper, TickResult
from hotsplit.plan.rebalance import Swap


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is explored."""

    layouts: tuple[LayerRows, ...]
    """Rows per layer, either placement."""
    publish: PublishRule = "done"
    """The Swapper's publish rule."""
    side_streams: Literal[1, 2] = 1
    """The Swapper's side streams."""
    backend: Callable[..., SimBackend] = SimBackend
    """The backend, or a mutant of it."""
    swapper: type[Swapper] = Swapper
    """The swapper, or a mutant of it."""
    num_chunks: int = 1
    """Pieces per tensor, of which there are two."""
    launch_ahead: int = 2
    """Unfinished steps at which the host stops launching."""
    max_swaps: int = 1
    """Swaps per layer and update."""
    num_failures: int = 0
    """Copies that fail in one run; every copy at every part gets its turn."""


@dataclass(kw_only=True, slots=True)
class Finding:
    """What the exploration found."""

    num_states: int = 0
    """Distinct states."""
    num_transitions: int = 0
    """Moves between them."""
    num_swaps: int = 0
    """Moves in which a swap was completed."""
    num_failures: int = 0
    """Moves in which a failure was reported."""
    violation: str | None = None
    """The first violation, None where every state is sound."""
    trace: tuple[str, ...] = ()
    """The moves that led to it."""
    num_stuck: int = 0
    """States from which no future without new requests completes every swap and empties every stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    swapper: Swapper
    backend: SimBackend
    failures_left: int

    def key(self) -> Hashable:
        """Equal for states with equal futures."""
        return (self.swapper.snapshot(event_key=self.backend.event_key), self.backend.key(), self.failures_left)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    name: str
    stream: Stream | None = None
    fails: bool = False
    update: tuple[Swap, ...] = ()


@dataclass(kw_only=True, slots=True)
class _Graph:
    states: list[_State] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)
    quiet: list[int] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    """Per state, the states that lead to it without a new request."""


def exclusive(num_experts: int, *, hot: int) -> LayerRows:
    """A layer whose slow memory holds only the cold experts."""
    return place(tuple(range(hot)), num_experts=num_experts, spare=True, inclusive=False)


def inclusive(num_experts: int, *, hot: int) -> LayerRows:
    """A layer whose slow memory keeps every expert."""
    return place(tuple(range(hot)), num_experts=num_experts, spare=True, inclusive=True)


def explore(scenario: Scenario) -> Finding:
    """Visit every reachable state, until one is in violation or none is left."""
    finding, graph, seen = Finding(), _Graph(), {}

    def reach(state: _State, *, parent: int, move: _Move) -> None:
        key = state.key()
        if key not in seen:
            seen[key] = len(graph.states)
            graph.states.append(state)
            graph.parents.append((parent, move.name))
            graph.before.append([])
            todo.append(seen[key])
        if parent >= 0 and not move.update:
            graph.before[seen[key]].append(parent)

    todo: deque[int] = deque()
    reach(_initial(scenario), parent=-1, move=_Move(name="start"))
    while todo:
        index = todo.popleft()
        state = graph.states[index]
        if _is_quiet(state):
            graph.quiet.append(index)
        for move in _moves(state, scenario=scenario):
            finding.num_transitions += 1
            try:
                reach(_after(state, move=move, finding=finding), parent=index, move=move)
            except SimViolation as violation:
                finding.num_states, finding.violation = len(seen), str(violation)
                finding.trace = (*_trace(graph, index=index), move.name)
                return finding
    finding.num_states = len(seen)
    finding.num_stuck = len(seen) - _num_that_come_to_rest(graph)
    return finding


def _initial(scenario: Scenario) -> _State:
    backend = scenario.backend(scenario.layouts, num_chunks=scenario.num_chunks)
    swapper = scenario.swapper(
        backend, layouts=scenario.layouts, publish=scenario.publish, side_streams=scenario.side_streams
    )
    return _State(swapper=swapper, backend=backend, failures_left=scenario.num_failures)


def _moves(state: _State, *, scenario: Scenario) -> Iterator[_Move]:
    for stream in state.backend.enabled():
        yield _Move(name=f"{stream} goes on", stream=stream)
        if state.failures_left and state.backend.is_copying(stream):
            yield _Move(name=f"{stream} fails", stream=stream, fails=True)
    if state.backend.num_steps() < scenario.launch_ahead:
        for update in _updates(state.swapper, scenario=scenario):
            yield _Move(name=f"host: {update or 'tick'}", update=update)


def _updates(swapper: Swapper, *, scenario: Scenario) -> Iterator[tuple[Swap, ...]]:
    """Every update that asks for up to max_swaps swaps in each layer that is free, the empty one first."""
    busy = swapper.busy()
    per_layer = [
        _layer_updates(swapper, layer_id=layer_id, max_swaps=0 if layer_id in busy else scenario.max_swaps)
        for layer_id in range(len(scenario.layouts))
    ]
    for choice in product(*per_layer):
        yield sum(choice, ())


def _layer_updates(swapper: Swapper, *, layer_id: int, max_swaps: int) -> list[tuple[Swap, ...]]:
    hot = swapper.hot_experts(layer_id)
    cold = [expert for expert in range(len(swapper.row_map(layer_id))) if expert not in hot]
    return [
        tuple(Swap(layer_id=layer_id, expert_in=i, expert_out=o) for i, o in zip(experts_in, experts_out, strict=True))
        for num_swaps in range(max_swaps + 1)
        for experts_in in permutations(cold, num_swaps)
        for experts_out in permutations(sorted(hot), num_swaps)
    ]


def _after(state: _State, *, move: _Move, finding: Finding) -> _State:
    backend = state.backend.fork()
    swapper = state.swapper.fork(backend)
    if move.stream is not None:
        backend.advance(move.stream, fail=move.fails)
        return _State(swapper=swapper, backend=backend, failures_left=state.failures_left - move.fails)
    num_asked = num_under_way(swapper)
    for swap in move.update:
        num_asked += swapper.request(swap.layer_id, expert_in=swap.expert_in, expert_out=swap.expert_out)
    result = swapper.tick()
    backend.launch_step()
    _require_accounts(swapper, result=result, num_asked=num_asked)
    finding.num_swaps += bool(result.published)
    finding.num_failures += bool(result.failed)
    return _State(swapper=swapper, backend=backend, failures_left=state.failures_left)


def num_under_way(swapper: Swapper) -> int:
    """Swaps queued or in flight."""
    return sum(len(layer.queue) + (layer.flight is not None) for layer in swapper._layers)


def _require_accounts(swapper: Swapper, *, result: TickResult, num_asked: int) -> None:
    """Every swap asked for is completed, dropped with a failure, or still under way."""
    kept = {layer_id for layer_id in range(len(swapper._layers)) if swapper.spare_row(layer_id) is None}
    num_dropped = sum(swap.layer_id not in kept for swap, _ in result.failed)
    if num_asked != len(result.published) + num_dropped + num_under_way(swapper):
        raise SimViolation("swaps", got=f"{num_asked} asked for, {result}", wanted="each of them accounted for")


def _is_quiet(state: _State) -> bool:
    """Whether nothing is under way; the Swapper's map must then be the backend's."""
    if not (state.backend.is_empty() and state.swapper.is_idle()):
        return False
    layer_ids: Sequence[int] = range(len(state.swapper._layers))
    return all(state.swapper.row_map(layer_id) == state.backend.row_map(layer_id) for layer_id in layer_ids)


def _trace(graph: _Graph, *, index: int) -> tuple[str, ...]:
    names: list[str] = []
    while index >= 0:
        index, name = graph.parents[index]
        names.append(name)
    return tuple(reversed(names))


def _num_that_come_to_rest(graph: _Graph) -> int:
    """States from which some future without new requests is quiet; the rest is dead- or livelocked."""
    reached, todo = set(graph.quiet), list(graph.quiet)
    while todo:
        for index in graph.before[todo.pop()]:
            if index not in reached:
                reached.add(index)
                todo.append(index)
    return len(reached)
