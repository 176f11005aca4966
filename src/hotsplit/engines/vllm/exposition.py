"""hotsplit's numbers on vLLM's own /metrics, with no variable to export.

The end of the flow: `counters -> snapshot files, one per rank -> /metrics`. The workers write the files; the process
that answers /metrics is another one, and reads them when it is asked. It may hold one of two kinds of registry:

    one API server                    prometheus_client.REGISTRY                    our collector is in it
    several, or                       a new registry at every scrape, with one      its collect() is wrapped,
    PROMETHEUS_MULTIPROC_DIR is set   MultiProcessCollector and nothing else        and brings ours along
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.metrics import METRICS, Metric, Sample, read_snapshot, snapshot_path

logger = logging.getLogger(__name__)

_MARK = "hotsplit_collector"
"""Attribute of the wrapped collect() that holds the collector: the mark that this process is done, and no global."""


def expose(run_dir: Path) -> None:
    """Put every rank's numbers on this process's /metrics, whichever registry answers.

    Once per process: a second call changes nothing but the folder, which is the newest engine's then.

    Args:
        run_dir: Where the ranks write their snapshots; it need not be there yet.
    """
    import prometheus_client
    from prometheus_client import multiprocess

    theirs: Any = multiprocess.MultiProcessCollector
    collector: SnapshotCollector | None = getattr(theirs.collect, _MARK, None)
    if collector is not None:
        collector.run_dir = run_dir
        return
    collector = SnapshotCollector(run_dir)
    prometheus_client.REGISTRY.register(collector)
    theirs.collect = _with_ours(theirs.collect, collector=collector)
    # A registry that wants to know names would call collect() for them, meet ours twice and refuse.
    theirs.describe = _no_names


def _with_ours(collect: Callable[[Any], Iterable[Any]], *, collector: SnapshotCollector) -> Callable[[Any], list[Any]]:
    """What MultiProcessCollector collects, and our numbers."""

    @functools.wraps(collect)
    def collect_both(self: Any) -> list[Any]:
        return [*collect(self), *(() if _stands_beside_ours(self) else collector.collect())]

    setattr(collect_both, _MARK, collector)
    return collect_both


def _no_names(_collector: Any) -> tuple[()]:
    """What a MultiProcessCollector says of its names to the registries that it is meant for: they do not ask."""
    return ()


def _stands_beside_ours(other: object) -> bool:
    """Whether a collector is in the registry that has ours already: every number would be there twice.

    NOTE: a private attribute; vLLM reads it too, and without it the answer is what vLLM's own registries need.
    """
    import prometheus_client

    return other in getattr(prometheus_client.REGISTRY, "_collector_to_names", ())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What a snapshot file held when it was read."""

    version: tuple[int, ...]
    """Tells two states of the file apart: a snapshot is replaced, never written over."""
    samples: Sequence[Sample]
    """All numbers of the rank."""
    is_sound: bool
    """Whether it was a snapshot of its rank."""


_UNREAD = _Read(version=(), samples=(), is_sound=True)


class SnapshotCollector:
    """Turns a run's snapshot files into metric families at every scrape; made by `expose`.

    A file is read again only when it was replaced. One that cannot be read or is no snapshot of its rank is left out
    and said once, until it is sound again: no scrape fails by it.

    Args:
        run_dir: The run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._files: dict[Path, _Read] = {}

    def describe(self) -> list[Any]:
        """All families without a number: a registry asks for names, at a time when there may be no file."""
        return [_family(metric, ()) for metric in METRICS.values()]

    def collect(self) -> list[Any]:
        """All families that have a number, of all ranks."""
        samples = [sample for path in sorted(self.run_dir.glob("rank*.json")) for sample in self._samples(path)]
        found = {name: [sample for sample in samples if sample.name == name] for name in METRICS}
        return [_family(METRICS[name], of_name) for name, of_name in found.items() if of_name]

    def _samples(self, path: Path) -> Sequence[Sample]:
        """A rank's numbers; none where its file is damaged, or gone since the folder was listed."""
        before = self._files.get(path, _UNREAD)
        try:
            stat = path.stat()
        except OSError:
            return ()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version == before.version:
            return before.samples
        samples, reason = _read(path)
        if reason and before.is_sound:
            logger.warning("%s; left out of /metrics until it can be read", reason)
        self._files[path] = _Read(version=version, samples=samples, is_sound=not reason)
        return samples


def _read(path: Path) -> tuple[list[Sample], str]:
    """A file's numbers, or why there are none."""
    try:
        snapshot = read_snapshot(path)
        if snapshot_path(path.parent, rank=snapshot.rank) != path:
            # Two files of one rank would be two samples of one name, and whoever scrapes would refuse them all.
            return [], f"snapshot {path}: got rank {snapshot.rank}; wanted the rank of its name"
        return snapshot.to_samples(), ""
    except HotsplitError as error:
        return [], str(error)
    except OverflowError:
        return [], f"snapshot {path}: got a number that no metric can hold"


def _family(metric: Metric, samples: Iterable[Sample]) -> Any:
    """One name with its samples. A counter's family drops the _total of its name, and writes it behind each sample."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = (*metric.labels, "rank")
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=labels)
    for sample in samples:
        family.add_metric([str(sample.labels[label]) for label in labels], sample.value)
    return family
