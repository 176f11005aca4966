"""The check of a device, dry: every line runs on a CPU, no number gets out, and whatever is wrong fails the run."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotsplit.bank.checks import mutants
from hotsplit.bank.checks.bench import DRY, Bench, Check, Clock
from hotsplit.bank.checks.dry_device import DryDevice, dry_kernels
from hotsplit.bank.checks.findings import Fact, Figure, Goal, Proof
from hotsplit.bank.checks.links import link_rate
from hotsplit.bank.checks.machine import link_files
from hotsplit.bank.checks.mutants import MODES, MUTANTS, Mode
from hotsplit.bank.checks.report import Report
from hotsplit.bank.cuda_check import CHECKS, run_checks, selected
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine

ROOT = Path(__file__).parents[2]
NAMES = [check.name for check in CHECKS]
STITCHED = ["hot_reads", "layers", "replays", "mutants", "swaps_in_flight", "copies"]
"""Checks that need one range in two memories."""

WITHOUT_PACKAGES = """
import sys

class Blocked:
    names = {"click", "rich", "safetensors", "platformdirs", "transformers", "accelerate", "vllm", "scipy"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
from hotsplit.bank.cuda_check import main
sys.exit(main(sys.argv[1:]))
"""


class TimedDevice(DryDevice):
    """Stand-ins whose times are taken for real ones."""

    is_dry = False


@pytest.fixture(autouse=True)
def one_thread():
    """Of tiny sizes, threads are all that takes time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """A whole dry run, in a process that has nothing but what the machine with the GPU has."""
    path = tmp_path_factory.mktemp("dry") / "found.json"
    command = [sys.executable, "-c", WITHOUT_PACKAGES, "--out", path, "--dry", "--commit", "abc"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}  # noqa: TID251 - handed on
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0 == done.returncode, done.stdout + done.stderr
    return (
        json.loads(path.read_text()),
        done.stdout,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def run(tmp_path, *, only=None, checks=None, device=None, left_s=1000.0, sizes=DRY):
    """Run checks in this process; the exit code, the report, and the JSON as a reader finds it."""
    path, lines = tmp_path / "found.json", []
    device = device or DryDevice()
    report = Report(path=path, checks=checks or selected(only), environment={}, is_dry=device.is_dry, say=lines.append)
    code = run_checks(Bench(device=device, sizes=sizes, clock=Clock(left_s)), report)
    found = json.loads(path.read_text())
    found["lines"] = lines
    return code, report, found


def check_of(found, name):
    return next(check for check in found["checks"] if check["name"] == name)


def findings_of(found, kind):
    return [finding for check in found["checks"] for finding in check["findings"] if finding["kind"] == kind]


def names_of_failed_proofs(found):
    return [proof["name"] for proof in findings_of(found, "proof") if not proof["holds"]]


def test_a_dry_run_needs_torch_and_numpy_alone_and_every_check_passes(dry_run):
    found, _, _ = dry_run
    assert dict.fromkeys(NAMES, "passed") == {check["name"]: check["status"] for check in found["checks"]}
    assert [] == found["failures"]
    assert (True, True, "abc") == (found["dry"], found["finished"], found["environment"]["commit"])


def test_no_number_of_a_dry_run_is_written(dry_run):
    found, output, _ = dry_run
    numbers = findings_of(found, "figure") + findings_of(found, "fact")
    assert {"dry"} == {finding["state"] for finding in numbers}
    figures = findings_of(found, "figure")
    empty = {"value": None, "bound": None, "ratio": None, "meets_goal": None}
    assert [empty] * len(figures) == [{key: figure[key] for key in empty} for figure in figures]
    assert {None} == {fact["value"] for fact in findings_of(found, "fact")}
    assert {None} == {check["seconds"] for check in found["checks"]}
    assert "GB/s" not in output


def test_every_subject_of_the_device_check_has_its_figures(dry_run):
    found, _, _ = dry_run
    figures = {check["name"]: [one["name"] for one in check["findings"]] for check in found["checks"]}
    wanted = {
        "machine": ["attributes", "link", "NUMA nodes"],
        "dma": ["h2d, copies of 1.0 MiB", "d2h, copies of 1.0 MiB", "both ways at once, sum"],
        "hot_reads": ["hot rows of a range, 0.3 MiB"],
        "layers": [
            f"{dtype}, T = {num_tokens}, {part}"
            for dtype in ("bf16", "fp8")
            for num_tokens in (1, 4, 16)
            for part in ("all hot", "half hot", "all cold")
        ],
        "mutants": [f"found: {mutant.name}" for mutant in MUTANTS],
        "route": ["graph nodes of the route op, one layer", "route op, one layer"],
        "publish": ["publish of one entry, on the device"],
        "swaps_in_flight": ["decode with swaps in flight"],
        "copies": ["cold reads beside copies in", "copies out beside cold reads"],
        "cold_reads": [
            f"cold rows, {kind}, 1.0 MiB"
            for kind in ("one range, HOST_NUMA node 0", "one range, HOST", "cudaHostAlloc", "huge pages, registered")
        ],
    }
    assert {} == {
        name: set(names) - set(figures[name]) for name, names in wanted.items() if set(names) - set(figures[name])
    }


def test_a_dry_run_takes_less_than_a_minute_of_one_core(dry_run):
    _, _, cpu_s = dry_run
    assert 60 > cpu_s


def test_the_promised_goals_stand_beside_their_figures(dry_run):
    found, _, _ = dry_run
    goals = {figure["name"]: figure["goal"] for figure in findings_of(found, "figure")}
    assert ">= 0.9" == goals["cold rows, one range, HOST_NUMA node 0, 1.0 MiB"]
    assert ">= 0.99" == goals["hot rows of a range, 0.3 MiB"]
    assert "<= 1.15" == goals["fp8, T = 16, half hot"]
    assert ">= 0.98" == goals["decode with swaps in flight"]
    for name in ("graph nodes of the route op, one layer", "publish of one entry, on the device"):
        assert "<= 1" == goals[name]


def test_nothing_is_held_after_a_run(tmp_path):
    driver = FakeDriver()
    code, _, _ = run(tmp_path, device=DryDevice(driver))
    assert (0, NOTHING) == (code, driver.held)


@pytest.mark.parametrize(
    ("only", "call", "nth"),
    [
        ("backing", "cuMemcpyAsync", 3),
        ("backing", "cuMemUnmap", 6),
        ("dma", "cuMemcpyAsync", 5),
        ("hot_reads", "cuMemMap", 8),
        ("layers", "cuMemSetAccess", 12),
        ("replays", "cuMemsetD32Async", 9),
        ("copies", "cuMemAddressReserve", 4),
        ("cold_reads", "cuMemHostRegister", 2),
    ],
)
def test_a_call_that_fails_is_recorded_and_fails_the_run(only, call, nth, tmp_path):
    driver = FakeDriver()
    driver.fail(nth, call=call, error="CUDA_ERROR_UNKNOWN")
    code, report, found = run(tmp_path, only=only, device=DryDevice(driver))
    assert 1 == code
    assert "failed" == check_of(found, only)["status"]
    assert [f"{only}: {check_of(found, only)['reason']}"] == list(report.failures) == found["failures"]
    assert f"{call}: got CUDA_ERROR_UNKNOWN" in check_of(found, only)["reason"]


def test_the_checks_after_a_failed_one_run_all_the_same(tmp_path):
    def broken(bench):
        yield Proof(name="so far", holds=True)
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    checks = [Check(name="broken", title="", run=broken, seconds=0), *selected("machine")]
    code, report, found = run(tmp_path, checks=checks)
    assert (1, ("broken: RuntimeError: CUDA error: an illegal memory access",)) == (code, report.failures)
    assert ["so far"] == [finding["name"] for finding in check_of(found, "broken")["findings"]]
    assert "passed" == check_of(found, "machine")["status"]


def test_a_mutant_that_nothing_notices_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "MUTANTS", (Mode(name="no mistake at all", rule="enqueued", lags=True),))
    code, _, found = run(tmp_path, only="mutants")
    assert (1, ["found: no mistake at all"]) == (code, names_of_failed_proofs(found))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_swap_that_is_wrong_fails_the_replays(mutant, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "MODES", (*MODES, mutant))
    sizes = dataclasses.replace(DRY, replays=DRY.mutant_replays)
    code, _, found = run(tmp_path, only="replays", sizes=sizes)
    assert 1 == code
    assert f"{mutant.name}: equal to the unpermuted copy" in names_of_failed_proofs(found)


def test_a_route_op_that_counts_twice_fails_the_replays(tmp_path):
    right = dry_kernels()

    def twice(topk_ids, *, counters, **kwargs):
        right.route_and_count(topk_ids, counters=counters, **kwargs)
        return right.route_and_count(topk_ids, counters=counters, **kwargs)

    device = DryDevice(kernels=dataclasses.replace(right, route_and_count=twice))
    code, _, found = run(tmp_path, only="replays", device=device)
    assert (1, [f"{mode.name}: replays are counted by their own map" for mode in MODES]) == (
        code,
        names_of_failed_proofs(found),
    )


def test_an_expert_whose_bits_hang_on_its_row_fails_the_layers(tmp_path):
    right = dry_kernels()

    def wrong(hidden_states, *, rows, **kwargs):
        out = right.experts(hidden_states, rows=rows, **kwargs)
        out[0, 0] *= 1 + 2**-7 * (rows.first_cold == 0)
        return out

    code, _, found = run(tmp_path, only="layers", device=DryDevice(kernels=dataclasses.replace(right, experts=wrong)))
    failed = names_of_failed_proofs(found)
    assert 1 == code
    assert 6 == len(failed)
    assert all("all cold: equal to the unpermuted layer, bit by bit" in name for name in failed)


def test_a_kernel_far_from_its_twin_fails_the_layers(tmp_path):
    right = dry_kernels()

    def wrong(hidden_states, **kwargs):
        return right.experts(hidden_states, **kwargs) * 1.02

    code, _, found = run(tmp_path, only="layers", device=DryDevice(kernels=dataclasses.replace(right, experts=wrong)))
    names = [
        f"{dtype}, T = {num_tokens}: close to the torch twin" for dtype in ("bf16", "fp8") for num_tokens in (1, 4, 16)
    ]
    assert (1, names) == (code, names_of_failed_proofs(found))


def test_a_read_of_wrong_bytes_fails_the_reads(tmp_path):
    right = dry_kernels()

    def wrong(rows, *, order):
        return right.sum_rows(rows, order=order.roll(1))

    code, _, found = run(
        tmp_path, only="cold_reads", device=DryDevice(kernels=dataclasses.replace(right, sum_rows=wrong))
    )
    assert 1 == code
    assert 4 == len([name for name in names_of_failed_proofs(found) if name.endswith("all are read whole")])


def test_what_does_not_fit_into_the_time_is_not_measured(tmp_path):
    code, _, found = run(tmp_path, device=TimedDevice(), left_s=12)
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert (0, "passed") == (code, statuses["machine"])
    late = check_of(found, "layers")
    assert ("not measured", []) == (late["status"], late["findings"])
    assert late["reason"].endswith("s were left, and it needs 30")
    assert "  not measured: layers" in found["lines"]


def test_a_run_that_dies_leaves_what_it_found_and_where_it_was(tmp_path):
    def killed(bench):
        yield Proof(name="so far", holds=True)
        raise KeyboardInterrupt

    first, last = selected("machine")[0], Check(name="last", title="", run=killed, seconds=0)
    checks = [first, Check(name="killed", title="", run=killed, seconds=0), last]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, checks=checks)
    found = json.loads((tmp_path / "found.json").read_text())
    assert ["passed", "begun", "not measured"] == [check["status"] for check in found["checks"]]
    assert [None, "the run ended in this check", "the run ended before"] == [one["reason"] for one in found["checks"]]
    assert ["so far"] == [one["name"] for one in check_of(found, "killed")["findings"]]
    assert not found["finished"]


def test_memory_that_the_device_does_not_have_is_not_measured_and_no_failure(tmp_path):
    driver = FakeDriver(FakeMachine(unsupported=frozenset({"host"})))
    code, _, found = run(tmp_path, only="cold_reads", device=TimedDevice(driver))
    figures = {figure["name"]: figure for figure in check_of(found, "cold_reads")["findings"]}
    refused = figures["cold rows, one range, HOST"]
    assert (0, "not measured", "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0") == (
        code,
        refused["state"],
        refused["reason"],
    )
    assert "measured" == figures["cold rows, one range, HOST_NUMA node 0, 1.0 MiB"]["state"]


def test_memory_of_which_the_device_says_nothing_may_be_refused(tmp_path):
    figure = "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    machine = FakeMachine(unsupported=frozenset({"host"}), attributes={figure: None})
    code, _, found = run(tmp_path, only="cold_reads", device=TimedDevice(FakeDriver(machine)))
    figures = {figure["name"]: figure for figure in check_of(found, "cold_reads")["findings"]}
    assert (0, "not measured") == (code, figures["cold rows, one range, HOST"]["state"])
    assert "CUDA_ERROR_NOT_SUPPORTED" in figures["cold rows, one range, HOST"]["reason"]


def test_footprints_beyond_the_memory_there_is_are_not_measured(tmp_path, monkeypatch):
    limits = dataclasses.make_dataclass("Limits", [("available_bytes", int)])(DRY.footprints[0])
    monkeypatch.setattr("hotsplit.bank.checks.reads.memory_limits", lambda: limits)
    code, _, found = run(tmp_path, only="cold_reads", device=TimedDevice())
    states = {figure["name"]: figure["state"] for figure in findings_of(found, "figure")}
    assert (0, "measured", "not measured") == (
        code,
        states["cold rows, cudaHostAlloc, 0.2 MiB"],
        states["cold rows, cudaHostAlloc, 1.0 MiB"],
    )


def test_where_no_range_can_be_stitched_the_other_checks_still_measure(tmp_path):
    driver = FakeDriver(FakeMachine(unsupported=frozenset({"host", "host_numa"})))
    code, _, found = run(tmp_path, device=DryDevice(driver))
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert dict.fromkeys(NAMES, "passed") | dict.fromkeys(STITCHED, "not measured") == statuses
    assert 0 == code


def test_figures_stand_beside_bounds_of_the_same_run(tmp_path):
    _, _, found = run(tmp_path, only="cold_reads", device=TimedDevice())
    figures = {figure["name"]: figure for figure in findings_of(found, "figure")}
    read = figures["cold rows, one range, HOST_NUMA node 0, 1.0 MiB"]
    copies = [figure["value"] for name, figure in figures.items() if name.startswith("h2d, copies of")]
    assert ("the copy engine", max(copies)) == (read["bound_is"], read["bound"])
    assert read["value"] / read["bound"] == read["ratio"]
    assert (read["ratio"] >= 0.9) is read["meets_goal"]


def test_a_missed_goal_is_told_and_is_no_failure(tmp_path):
    def slow(bench):
        yield Figure(name="reads", value=2.0, unit="bytes/s", bound=4.0, bound_is="copies", goal=Goal(least=0.9))
        yield Fact(name="why", value="a slow link")

    code, _, found = run(tmp_path, checks=[Check(name="slow", title="", run=slow, seconds=0)], device=TimedDevice())
    (figure,) = findings_of(found, "figure")
    assert (0, 0.5, False) == (code, figure["ratio"], figure["meets_goal"])
    assert {"  0 of 1 goals are reached", "  goal missed: reads"} <= set(found["lines"])


@pytest.mark.parametrize("name", NAMES)
def test_one_check_runs_with_what_it_needs_and_nothing_else(name):
    chosen = [check.name for check in selected(name)]
    needed = {one for check in selected(name) for one in check.needs}
    assert {name, *needed} == set(chosen)
    assert sorted(chosen, key=NAMES.index) == chosen


def test_the_rate_of_a_link_follows_from_its_generation_and_width(tmp_path):
    folder = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("8\n")
    files = link_files("0000:17:00.0", root=tmp_path)
    assert {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "8"} == {
        name: value for name, value in files.items() if value
    }
    assert pytest.approx(15.75e9, rel=1e-3) == link_rate(files)
    assert None is link_rate(link_files("0000:18:00.0", root=tmp_path))
