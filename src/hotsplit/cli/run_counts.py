"""What a server on this host has counted: found among the runs of a state folder, read when it is fresh.

    run folder -> ask, wait for every rank -> snapshots -> counts of all layers;  later minus earlier = traffic between

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotsplit.bank import runs
from hotsplit.errors import EngineError, HistogramError, HotsplitError
from hotsplit.metrics import MetricsSnapshot, Sample, read_snapshot, snapshot_path
from hotsplit.notices import Notice
from hotsplit.plan.histogram import PHASES, Histogram, PhaseCounts
from hotsplit.plan.sizes import ExpertSizes

ANSWER_S = 60.0
"""How long a server may take to write down what it has counted: a step of a long prefill, and a slow disk."""
_LOOK_S, _ASK_AGAIN_S = 0.05, 1.0

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounts:
    """Routed pairs of all MoE layers."""

    layers: tuple[int, ...]
    """Decoder indices, ascending, [L]."""
    tokens: Mapping[str, int]
    """By phase."""
    counts: Mapping[str, Counts]
    """By phase, [L, E], int64."""

    @classmethod
    def zeros(cls, layers: Sequence[int], *, num_experts: int) -> RunCounts:
        """Nothing counted yet.

        Args:
            layers: Decoder indices.
            num_experts: Per layer.
        """
        shape = (len(layers), num_experts)
        zeros = {phase: np.zeros(shape, dtype=np.int64) for phase in PHASES}
        return cls(layers=tuple(layers), tokens=dict.fromkeys(PHASES, 0), counts=zeros)

    def since(self, earlier: RunCounts) -> RunCounts:
        """What came after an earlier reading.

        Args:
            earlier: Of the same run.

        Raises:
            EngineError: It counted more: the server has been started anew.
        """
        passed = self._combined(earlier, sign=-1)
        if any((counts_LE < 0).any() for counts_LE in passed.counts.values()):
            do = "start again: what was played before the restart is kept"
            raise EngineError("the server", got="fewer counts than a moment ago: it was started anew", do=do)
        return passed

    def plus(self, more: RunCounts) -> RunCounts:
        """The sum.

        Args:
            more: Of the same model.
        """
        return self._combined(more, sign=1)

    def _combined(self, other: RunCounts, *, sign: int) -> RunCounts:
        if (self.layers, self.shape) != (other.layers, other.shape):
            got = f"{other.shape} layers and experts, and {self.shape}"
            raise EngineError("counts of two readings", got=got, wanted="those of one model")
        return RunCounts(
            layers=self.layers,
            tokens={phase: self.tokens[phase] + sign * other.tokens[phase] for phase in PHASES},
            counts={phase: self.counts[phase] + sign * other.counts[phase] for phase in PHASES},
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts."""
        num_layers, num_experts = self.counts["decode"].shape
        return num_layers, num_experts

    def to_json(self) -> dict[str, Any]:
        """Plain lists."""
        counts = {phase: self.counts[phase].tolist() for phase in PHASES}
        return {"layers": list(self.layers), "tokens": dict(self.tokens), "counts": counts}

    @classmethod
    def from_json(cls, value: Any) -> RunCounts:
        """The inverse.

        Args:
            value: From to_json().

        Raises:
            KeyError, TypeError, ValueError: It is not.
        """
        counts = {phase: np.array(value["counts"][phase]) for phase in PHASES}
        if any(counted.dtype != np.int64 for counted in counts.values()):
            raise ValueError("counts that are no whole numbers")
        tokens = {phase: int(value["tokens"][phase]) for phase in PHASES}
        layers = tuple(int(layer) for layer in value["layers"])
        shapes = {counted.shape for counted in counts.values()}
        if len(shapes) != 1 or len(counts["decode"].shape) != 2 or len(counts["decode"]) != len(layers):
            raise ValueError(f"counts of shapes {sorted(shapes)} for {len(layers)} layers")
        if min(tokens.values()) < 0 or any((counted < 0).any() for counted in counts.values()):
            raise ValueError("negative counts")
        return cls(layers=layers, tokens=tokens, counts=counts)


def histogram_of(counted: RunCounts, *, sizes: ExpertSizes, name: str) -> tuple[Histogram, list[Notice]]:
    """Counts as a histogram of the model.

    Args:
        counted: Of all its layers.
        sizes: Of the model.
        name: Of the model, for people.

    Returns:
        The histogram, with the phases that have tokens, and notices.

    Raises:
        HistogramError: Nothing was counted.
    """
    phases, notices = {}, list[Notice]()
    top_k = sizes.identity.top_k or 1
    for phase in PHASES:
        counts_LE, tokens = counted.counts[phase], counted.tokens[phase]
        if not counts_LE.any():
            continue
        is_whole = bool((counts_LE.sum(axis=1) == tokens * top_k).all())
        if not is_whole:
            text = f"{phase} counts are not tokens x top_k in every layer: a step broke off; tokens are left out"
            notices.append(Notice(name="broken-step", text=text, strict=False))
        phases[phase] = PhaseCounts(counts=counts_LE.astype(np.float64), tokens=tokens if is_whole else None)
    if not phases:
        raise HistogramError("the counts of the server", got="no routed token", do="play more traffic")
    return Histogram(
        identity=sizes.identity, phases=phases, name=name, quantisation=sizes.quantisation,
        source={"made_by": "hotsplit balance"},
    ), notices  # fmt: skip


def require_model(counted: RunCounts, *, sizes: ExpertSizes, model: str) -> None:
    """Refuse a server that counts another model than the one at hand.

    Args:
        counted: By the server.
        sizes: Of the model.
        model: Its name.

    Raises:
        EngineError: Layers, experts or top-k differ.
    """
    identity = sizes.identity
    found = [("layers", counted.layers, identity.layers), ("num_experts", counted.shape[1], identity.num_experts)]
    tokens = sum(counted.tokens.values())
    pairs = sum(int(counts_LE.sum()) for counts_LE in counted.counts.values())
    if tokens and identity.top_k:
        found.append(("top_k", round(pairs / (tokens * len(counted.layers))), identity.top_k))
    for field, theirs, ours in found:
        if theirs != ours:
            got = f"{field} {_short(theirs)} in its snapshots, and {_short(ours)} in {model}"
            raise EngineError(
                "the server counts another model", got=got, do="name the model that it serves", field=field
            )


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 4:
        return f"{value[0]}..{value[-1]} ({len(value)} layers)"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def join_ranks(snapshots: Sequence[MetricsSnapshot]) -> RunCounts:
    """Counts of all layers: one rank of each pipeline stage, since all of a stage's ranks see the same tokens.

    Args:
        snapshots: Of every rank of one run, at least one.

    Raises:
        EngineError: Ranks hold layers that overlap, or do not count the same model.
    """
    by_layers: dict[tuple[int, ...], MetricsSnapshot] = {}
    for snapshot in sorted(snapshots, key=lambda one: one.rank):
        by_layers.setdefault(tuple(snapshot.counts.get("decode", {})), snapshot)
    stages = [(layers, one) for layers, one in sorted(by_layers.items(), key=lambda item: item[0]) if layers]
    layers = tuple(layer for stage, _ in stages for layer in stage)
    if not layers or list(layers) != sorted(set(layers)):
        raise EngineError("the snapshots of the server", got=f"layers {_short(layers)}", wanted="each layer once")
    try:
        counts = {
            phase: np.array([one.counts[phase][layer] for stage, one in stages for layer in stage], dtype=np.int64)
            for phase in PHASES
        }
    except (KeyError, ValueError, OverflowError) as error:
        got = "layers or experts that differ between ranks or phases"
        raise EngineError("the snapshots of the server", got=got, wanted="those of one model") from error
    tokens = {phase: min(one.tokens.get(phase, 0) for _, one in stages) for phase in PHASES}
    return RunCounts(layers=layers, tokens=tokens, counts=counts)


def parallel_of(snapshots: Sequence[MetricsSnapshot]) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size: ranks of one stage hold the same layers.

    Args:
        snapshots: Of every rank of one run, at least one.
    """
    stages = {tuple(snapshot.counts.get("decode", {})) for snapshot in snapshots}
    return max(len(snapshots) // len(stages), 1), len(stages)


class CountedRun:
    """A server's run folder.

    Args:
        run_dir: The folder.
        is_alive: Asked while answers are waited for; what it raises ends the wait.
        timeout_s: Longest wait.
    """

    def __init__(
        self, run_dir: Path, *, is_alive: Callable[[], None] = lambda: None, timeout_s: float = ANSWER_S
    ) -> None:
        self.run_dir, self._is_alive, self._timeout_s = run_dir, is_alive, timeout_s

    def snapshots(self) -> list[MetricsSnapshot]:
        """Of all ranks, as of now: every step that has ended is in them.

        Raises:
            EngineError: A rank does not answer in time, or there is none.
        """
        names = (path.stem.removeprefix("rank") for path in self.run_dir.glob("rank*.json"))
        ranks = sorted(int(name) for name in names if name.isascii() and name.isdigit())
        if not ranks:
            raise EngineError(f"the run in {self.run_dir}", got="no snapshot of any rank")
        word = uuid.uuid4().hex
        asked_at, end = -math.inf, time.monotonic() + self._timeout_s
        while silent := [rank for rank in ranks if runs.told(self.run_dir, rank=rank) != word]:
            self._is_alive()
            # Somebody else may ask at the same time: whose word was written over asks again.
            if time.monotonic() - asked_at >= _ASK_AGAIN_S and runs.asked(self.run_dir) != word:
                runs.ask(self.run_dir, word=word)
                asked_at = time.monotonic()
            if time.monotonic() > end:
                got = f"no answer of rank {', '.join(map(str, silent))} for {self._timeout_s:g} s"
                do = "see that its hotsplit is of this version, and that it is not stuck"
                raise EngineError(f"the run in {self.run_dir}", got=got, wanted="fresh snapshots", do=do)
            time.sleep(_LOOK_S)
        return [read_snapshot(snapshot_path(self.run_dir, rank=rank)) for rank in ranks]

    def counts(self) -> RunCounts:
        """Everything that it has counted so far.

        Raises:
            EngineError: A rank does not answer in time.
        """
        return join_ranks(self.snapshots())


def find_run(state_dir: Path, *, shown: Callable[[], Sequence[Sample]], url: str) -> CountedRun:
    """The run of the server at a URL: the one whose fresh snapshots are what the server shows.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
        shown: Reads the server's /metrics.
        url: For messages.

    Raises:
        EngineError: None of the runs is it, or it cannot be told which.
    """
    what, do = f"the server at {url}", "set HOTSPLIT_STATE_DIR, or --state-dir, to that of the server"
    found = [CountedRun(path) for path in runs.live_runs(state_dir) if any(path.glob("rank*.json"))]
    if not found:
        got = f"no running server's snapshots in {state_dir / 'runs'}"
        raise EngineError(what, got=got, wanted="one on this host, with its state folder", do=do)
    folders = ", ".join(run.run_dir.name for run in found)
    fitting, silent = list[CountedRun](), None
    for _ in range(3):  # somebody else's traffic may pass between the two readings
        fitting = []
        for run in tuple(found):
            try:
                snapshots = run.snapshots()
            except HotsplitError as error:  # one that hangs, or whose folder is closed to us, is another, it is hoped
                silent = error
                found.remove(run)  # its silence is not waited for again
            else:
                fitting += [run] if _is_shown(snapshots, shown()) else []
        if len(fitting) == 1:
            return fitting[0]
        if silent is not None and not fitting:
            raise silent
    folders = ", ".join(run.run_dir.name for run in fitting) or folders
    got = f"{'several runs that count' if fitting else 'no run that counts'} what it shows on /metrics ({folders})"
    raise EngineError(what, got=got, wanted="one run", do=do)


def _is_shown(snapshots: Sequence[MetricsSnapshot], shown: Sequence[Sample]) -> bool:
    """Whether every counter of the snapshots is on /metrics with its value."""
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in shown}
    ours = [sample for snapshot in snapshots for sample in snapshot.to_samples() if sample.name.endswith("_total")]
    ours += [sample for snapshot in snapshots for sample in snapshot.to_samples() if sample.name == "hotsplit_info"]
    return all(values.get((one.name, tuple(sorted(one.labels.items())))) == one.value for one in ours)
