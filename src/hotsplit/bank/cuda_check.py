"""Every figure of the CUDA backend, each beside its bound, on one NVIDIA GPU in less than eight minutes.

    python -m hotsplit.bank.cuda_check --out FILE              on a machine with a GPU; `make gpu-check`
    python -m hotsplit.bank.cuda_check --out FILE --dry        every line of it on a CPU, and no figure
    python -m hotsplit.bank.cuda_check --out FILE --only NAME  one check, and those whose figures it needs

It needs torch with CUDA, triton, numpy and cuda.bindings, and nothing else to be installed: with src in PYTHONPATH it
runs from a copy of the repository. Checks are in checks/, one file per subject. One that fails is recorded with its
error, and the next one goes on; one that does not fit into the time is left out and says so.

It exits with 1 if a check failed: by an error, or because bytes were not what they should be. A goal that was missed is
told and is no failure: figures are what a device gives.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from hotsplit.bank.checks import copies, costs, layers, links, machine, reads, replays
from hotsplit.bank.checks.bench import DRY, FULL, Bench, Check, Clock
from hotsplit.bank.checks.device import Device
from hotsplit.bank.checks.findings import NotMeasured
from hotsplit.bank.checks.report import Report, Status
from hotsplit.errors import HotsplitError
from hotsplit.version import __version__

BUDGET_S: Final = 440.0
"""For all checks; what started in time may end a little later."""
_GRACE_S: Final = 30.0
"""After that the process is ended from outside of Python: a device that hangs never comes back."""
_TEXT_WIDTH: Final = 300
_DESCRIPTION: Final = "Every figure of the CUDA backend beside its bound, on one NVIDIA GPU."

CHECKS: Final = (
    Check(name="machine", title="what the machine says of itself", run=machine.check_machine, seconds=1),
    Check(
        name="backing",
        title="where cold rows can lie, and rows of odd sizes there",
        run=machine.check_backing,
        seconds=10,
        needs=("machine",),
    ),
    Check(name="hbm", title="GPU memory", run=links.check_hbm, seconds=5),
    Check(name="dma", title="the link, by the copy engine", run=links.check_dma, seconds=10),
    Check(name="hot_reads", title="hot rows", run=reads.check_hot_reads, seconds=5, needs=("backing", "dma")),
    Check(
        name="layers",
        title="routed experts of a layer",
        run=layers.check_layers,
        seconds=30,
        needs=("backing", "hbm", "dma"),
    ),
    Check(
        name="replays",
        title="swaps beside replays of a graph",
        run=replays.check_replays,
        seconds=15,
        needs=("backing",),
    ),
    Check(
        name="mutants",
        title="swaps with a mistake, beside replays",
        run=replays.check_mutants,
        seconds=15,
        needs=("backing",),
    ),
    Check(name="route", title="what the route op costs", run=costs.check_route, seconds=5),
    Check(name="publish", title="what a publish costs", run=costs.check_publish, seconds=3),
    Check(
        name="swaps_in_flight",
        title="what swaps cost a decode step",
        run=costs.check_swaps_in_flight,
        seconds=20,
        needs=("backing",),
    ),
    Check(
        name="copies",
        title="copies of rows beside cold reads",
        run=copies.check_copies_beside_reads,
        seconds=10,
        needs=("backing", "dma"),
    ),
    Check(
        name="cold_reads",
        title="cold rows, by kind of host memory and footprint",
        run=reads.check_cold_reads,
        seconds=20,
        needs=("backing", "dma"),
    ),
)
"""In the order in which they run: claims about bytes first, then what takes the most time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks.

    Args:
        arguments: Of the command line; None for the process's own.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    faulthandler.dump_traceback_later(options.seconds + _GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        device = _device(dry=options.dry)
        bench = Bench(device=device, sizes=DRY if options.dry else FULL, clock=Clock(options.seconds))
        report = Report(
            path=options.out,
            checks=selected(options.only),
            environment=_environment(device, commit=options.commit),
            is_dry=options.dry,
            say=_say,
        )
        return run_checks(bench, report)
    except HotsplitError as error:
        sys.stderr.write(f"hotsplit: {error}\n")
        return error.exit_code
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_checks(bench: Bench, report: Report) -> int:
    """Run all checks of a report, one after the other, whatever becomes of them.

    Args:
        bench: What they work with.
        report: Gets what they find.

    Returns:
        0 where nothing failed, else 1.
    """
    for check in report.checks:
        _run(check, bench=bench, report=report)
    report.finish()
    return 1 if report.failures else 0


def selected(name: str | None) -> tuple[Check, ...]:
    """One check and what it needs, in order; all of them for None.

    Args:
        name: Of the check.

    >>> [check.name for check in selected("replays")]
    ['machine', 'backing', 'replays']
    """
    if name is None:
        return CHECKS
    by_name = {check.name: check for check in CHECKS}
    wanted, queue = set(), [name]
    while queue:
        wanted.add(queue[-1])
        queue += [needed for needed in by_name[queue.pop()].needs if needed not in wanted]
    return tuple(check for check in CHECKS if check.name in wanted)


def _run(check: Check, *, bench: Bench, report: Report) -> None:
    """One check, from which nothing gets out but what it found."""
    left = bench.clock.left_s()
    if left < (0 if bench.device.is_dry else check.seconds):
        reason = f"{max(0, left):.0f} s were left, and it needs {check.seconds:g}"
        report.say(f"\n{check.name}: {check.title}")
        report.end(check, status="not measured", seconds=0, reason=reason)
        return
    report.begin(check)
    start = time.monotonic()
    status, reason = _found(check, bench=bench, report=report)
    report.end(check, status=status, seconds=time.monotonic() - start, reason=reason)
    _tidy(bench)


def _found(check: Check, *, bench: Bench, report: Report) -> tuple[Status, str]:
    """Let a check find; how it ended, and why."""
    try:
        for finding in check.run(bench):
            report.add(check, finding)
        bench.device.synchronise()
    except NotMeasured as error:
        return "not measured", str(error)
    except Exception as error:  # noqa: BLE001 - of torch, the driver or our own: whatever it is, the next check goes on
        return "failed", _one_line(error)
    return "passed", ""


def _tidy(bench: Bench) -> None:
    """Give back what a check left. A device that is broken says so in the next check, and not here."""
    with contextlib.suppress(Exception):
        bench.device.release()


def _device(*, dry: bool) -> Device:
    if dry:
        from hotsplit.bank.checks.dry_device import DryDevice

        torch.set_num_threads(1)  # of tiny sizes, threads are all that takes time
        return DryDevice()
    from hotsplit.bank.checks.cuda_device import CudaDevice

    return CudaDevice()


def _environment(device: Device, *, commit: str) -> dict[str, Any]:
    """Where and with what. What cannot be read is None, never 0."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hotsplit": __version__,
        "commit": commit or None,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "triton", "numpy", "cuda-bindings")},
        **device.describe(),
    }


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    """An error as it stands in the table."""
    text = " ".join(str(error).split())
    is_ours = isinstance(error, HotsplitError)
    return (text if is_ours else f"{type(error).__name__}: {text}")[:_TEXT_WIDTH]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hotsplit.bank.cuda_check", description=_DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--dry", action="store_true", help="run every line on a CPU; no figure is written")
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_S, metavar="N", help=f"time for all checks ({BUDGET_S:g})"
    )
    names = [check.name for check in CHECKS]
    parser.add_argument(
        "--only", choices=names, metavar="NAME", help=f"one check and what it needs: {', '.join(names)}"
    )
    parser.add_argument("--commit", default="", metavar="TEXT", help="what is measured, for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
