from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from host import numa_trees as trees
from host.host_trees import FakeNvml, fixture, nvml_gpu, put, put_gpu, put_host, tools
from hotsplit.cli import measuring, probing
from hotsplit.host.asking import known, unknown
from hotsplit.host.bandwidth import MemoryRates
from hotsplit.host.links import Link
from hotsplit.host.survey import read_survey
from hotsplit.plan.rates import load_rates

NO_NVML = "the package nvidia-ml-py is not installed"
GPU0, GPU1 = "0000:17:00.0", "0000:98:00.0"
KEYS = [
    "kind", "host", "gpus", "relations", "nodes", "limits", "budget", "measured", "rates", "unknown", "notices",
]  # fmt: skip


@pytest.fixture
def on_host(monkeypatch):
    """on_host(root, tool=..., nvml=...): the command probes that host, and host memory at once."""

    def at(root, *, tool=None, nvml=NO_NVML, memory=2e11):
        survey = read_survey(root=root, tool=tool or tools(), nvml=nvml, can_place=known("yes", "test"))
        monkeypatch.setattr(probing, "read_survey", lambda: survey)
        rate = MemoryRates(total=known(memory, "a test"))
        monkeypatch.setattr(measuring, "measure_memory", lambda nodes, *, available_bytes: rate)

    return at


@pytest.fixture
def with_cuda(monkeypatch):
    """with_cuda(bus_id, ...): stand-ins for GPUs that CUDA sees, in this order."""
    pytest.importorskip("torch")
    from hotsplit.bank import link_rates
    from hotsplit.bank.checks.dry_device import DryDevice
    from hotsplit.bank.fake_driver import FakeDriver, FakeMachine

    def see(*bus_ids, link=None):
        def opener(bus_id):
            return lambda: DryDevice(FakeDriver(FakeMachine(bus_id=bus_id)))

        monkeypatch.setattr(measuring, "torch_with_cuda", lambda survey: SimpleNamespace())
        monkeypatch.setattr(link_rates, "cuda_openers", lambda: [opener(bus_id) for bus_id in bus_ids])
        sizes = link_rates.LinkSizes
        small = {"device_bytes": 2**20, "passes": 1, "together_s": 0.0}
        monkeypatch.setattr(link_rates, "LinkSizes", lambda **given: sizes(**({"host_bytes": 2**24} | small)))
        if link is not None:
            monkeypatch.setattr(measuring, "read_link_now", lambda bus_id, *, is_loaded: link)

    return see


def server(root):
    put_host(root)
    trees.put_node(root, 0, cpus="0-3", total_gib=256, free_gib=200, distances="10 21")
    trees.put_node(root, 1, cpus="4-7", total_gib=256, free_gib=100, distances="21 10")
    put_gpu(root, ("pci0000:16", GPU0), node=0)
    put_gpu(root, ("pci0000:97", GPU1), node=1)
    return root


def test_this_very_host_is_probed_and_everything_unknown_has_a_reason(cli):
    result = cli("probe", "--no-measure", "--json")
    assert 0 == result.code, result.err
    told = json.loads(result.out)
    assert KEYS == list(told)
    assert nulls_without_reason(told) == []
    assert told["host"]["memory_bytes"] > 0


def nulls_without_reason(told):
    """Places of what is null and whose reason is not there; those that need none are left out."""
    free = ("relations", "limits", "budget", "rates", ".numastat", ".cuda_index", ".read_bytes_per_s", ".disk")

    def walk(value, place):
        if isinstance(value, dict):
            for key, member in value.items():
                yield from walk(member, f"{place}.{key}" if place else key)
        elif isinstance(value, list):
            for i, member in enumerate(value):
                yield from walk(member, f"{place}[{i}]")
        elif value is None:
            yield place

    nulls = [place for key in ("host", "gpus", "nodes", "measured") for place in walk(told[key], key)]
    return [place for place in nulls if place not in told["unknown"] and not place.endswith(free)]


def test_a_measured_host_is_a_rates_file_that_a_forecast_reads(cli, tmp_path, on_host, with_cuda, tiny_moe, counts):
    on_host(server(tmp_path / "host"), nvml=FakeNvml(nvml_gpu(), nvml_gpu("00000000:98:00.0")))
    five = known(5, "test")
    with_cuda(GPU0, GPU1, link=Link(generation=five, width=five, max_generation=five, max_width=five, is_loaded=True))
    path = tmp_path / "rates.json"
    result = cli("probe", "-o", path)
    assert 0 == result.code, result.err
    rates = load_rates(path)
    assert [("NVIDIA H200", 0), ("NVIDIA H200", 1)] == [(gpu.name, gpu.numa_node) for gpu in rates.gpus]
    assert 2e11 == rates.host.memory_bytes_per_s
    assert rates.measured.startswith("20")
    assert "gen 5 x5 under load" in result.out
    assert "[link-read-idle]" not in result.err
    plan = tmp_path / "plan.json"
    assert 0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 50 * 49152 / 2**30, "-o", plan).code
    content = json.loads(path.read_text())
    for gpu in content["gpus"]:  # a stand-in is too slow for a GPU, and left unknown: nobody forecasts with it
        gpu.update(hbm_bytes_per_s=3e12, in_place_bytes_per_s=2.5e10)
    path.write_text(json.dumps(content))
    assert 0 == cli("forecast", plan, "--counts", counts, "--rates", path).code


def test_gpus_stand_in_the_order_of_cuda_and_hidden_ones_are_left_out(cli, tmp_path, on_host, with_cuda):
    on_host(server(tmp_path / "host"), nvml=FakeNvml(nvml_gpu(), nvml_gpu("00000000:98:00.0", Name="second")))
    with_cuda(GPU1)
    result = cli("probe", "-o", tmp_path / "rates.json")
    (gpu,) = load_rates(tmp_path / "rates.json").gpus
    assert (0, "second") == (gpu.index, gpu.name)
    assert "CUDA does not see GPU 0" in result.err
    with_cuda(GPU1, GPU0)
    assert 0 == cli("probe", "-o", tmp_path / "rates.json").code
    gpus = load_rates(tmp_path / "rates.json").gpus
    assert [(0, "second", 1), (1, "NVIDIA H200", 0)] == [(gpu.index, gpu.name, gpu.numa_node) for gpu in gpus]


def test_without_torch_or_a_gpu_that_it_sees_rates_are_unknown_and_say_why(cli, tmp_path, on_host, monkeypatch):
    on_host(server(tmp_path), tool=tools(x=fixture("smi_two_h200.xml")))
    find = measuring.importlib.util.find_spec
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    told = json.loads(cli("probe", "--json").out)
    assert (
        "torch is not installed; in hotsplit's checkout run pip install '.[transformers]'"
        == told["unknown"]["gpus[0].in_place_bytes_per_s"]
    )
    assert None is told["rates"]["gpus"][0]["in_place_bytes_per_s"]
    assert 143771 * 2**20 == told["rates"]["gpus"][0]["memory_bytes"]
    assert [] == nulls_without_reason(told)


def test_torch_that_sees_no_gpu_and_a_driver_that_is_silent_are_reasons(cli, tmp_path, on_host):
    pytest.importorskip("torch")
    on_host(server(tmp_path), tool=tools(x=fixture("smi_two_h200.xml")))
    assert "sees no GPU" in json.loads(cli("probe", "--json").out)["unknown"]["gpus[0].hbm_bytes_per_s"]
    on_host(tmp_path)
    told = json.loads(cli("probe", "--json").out)
    assert f"no driver answers ({NO_NVML}; nvidia-smi is not installed)" == told["unknown"]["gpus[0].hbm_bytes_per_s"]
    assert 2 == len(told["rates"]["gpus"])


def test_idle_links_are_told_as_such(cli, tmp_path, on_host):
    on_host(server(tmp_path), tool=tools(x=fixture("smi_two_h200.xml")))
    result = cli("probe", "--no-measure")
    assert "gen 1 x16 idle" in result.out
    assert "[link-read-idle]" in result.err
    assert "not measured, because of --no-measure" in " ".join(result.out.split())


def test_the_limit_that_binds_is_named_with_the_command_that_raises_it(cli, tmp_path, on_host):
    root = put_host(tmp_path, memlock="65536", hard="unlimited")
    on_host(root)
    result = cli("probe", "--no-measure")
    text = " ".join(result.out.split())
    assert "host budget: 64 KiB, bound by memlock to raise it: ulimit -l unlimited" in text
    assert "a CPU alone has 400.000 GiB, by MemAvailable" in text
    assert "[pinning-limited]" in result.err
    told = json.loads(cli("probe", "--no-measure", "--json").out)["budget"]
    assert (65536, "memlock", 400 * 2**30) == (told["bytes"], told["binding"], told["not_locked_bytes"])


@pytest.mark.parametrize("is_believed", [True, False], ids=["rates that can be", "rates that nothing can have"])
def test_a_limit_on_locked_memory_that_the_driver_does_not_keep_is_said(
    cli, tmp_path, on_host, with_cuda, monkeypatch, is_believed
):
    # How fast a stand-in copies depends on what else this machine does; what was locked was locked all the same.
    monkeypatch.setattr(measuring, "is_plausible", lambda name, rate: is_believed)
    root = server(tmp_path)
    put_host(root, memlock="65536")
    on_host(root, nvml=FakeNvml(nvml_gpu(), nvml_gpu("00000000:98:00.0")))
    with_cuda(GPU0, GPU1)
    assert "[lock-limit-not-counted]" in cli("probe").err
    assert "[lock-limit-not-counted]" not in cli("probe", "--no-measure").err


def test_a_bare_host_is_a_file_that_says_what_a_forecast_misses(cli, tmp_path, on_host, tiny_moe, counts):
    on_host(tmp_path / "nothing")
    path = tmp_path / "rates.json"
    result = cli("probe", "--no-measure", "-o", path)
    assert 0 == result.code, result.err
    assert ((), None) == (load_rates(path).gpus, load_rates(path).measured)
    assert " 0.0 " not in result.out
    assert "host budget: unknown" in result.out
    plan = tmp_path / "plan.json"
    assert 0 == cli("plan", tiny_moe, "--counts", counts, "--hot-gib", 50 * 49152 / 2**30, "-o", plan).code
    line = cli("forecast", plan, "--counts", counts, "--rates", path).refusal()
    assert "which has no GPU: got unknown: hbm_bytes_per_s of GPU 0, in_place_bytes_per_s of GPU 0" in line


def test_a_rate_that_nothing_can_have_is_left_unknown_aloud(cli, tmp_path, on_host):
    on_host(put_host(tmp_path / "host"), memory=5.0)
    result = cli("probe", "-o", tmp_path / "rates.json")
    assert None is load_rates(tmp_path / "rates.json").host.memory_bytes_per_s
    assert "[rate-implausible]" in result.err


def test_the_disk_of_a_folder_is_measured_and_named(cli, tmp_path, on_host, monkeypatch):
    on_host(put_host(tmp_path / "host"))
    seen = []

    def disk(folder, *, row_bytes):
        seen.append((folder, row_bytes))
        return SimpleNamespace(rate=known(3.2e9, "a test"), notices=())

    monkeypatch.setattr(measuring, "measure_disk", disk)
    monkeypatch.setattr(probing, "mount_of", lambda folder: unknown("a test"))
    (tmp_path / "model").mkdir()
    told = json.loads(cli("probe", "--json", "--dir", tmp_path / "model").out)
    assert 3.2e9 == told["rates"]["host"]["disk_bytes_per_s"]
    assert [(tmp_path / "model", 8 * 2**20)] == seen


def test_rows_of_the_models_own_size_are_read(cli, tmp_path, on_host, monkeypatch, tiny_moe):
    on_host(put_host(tmp_path))
    seen = []
    monkeypatch.setattr(
        measuring,
        "measure_disk",
        lambda folder, *, row_bytes: seen.append(row_bytes) or SimpleNamespace(rate=unknown("x"), notices=()),
    )
    assert 0 == cli("probe", "--dir", tiny_moe).code
    assert [49152] == seen


def test_a_folder_in_memory_is_on_no_disk(cli, tmp_path, on_host, monkeypatch):
    on_host(put_host(tmp_path))
    monkeypatch.setattr(
        probing, "mount_of", lambda folder: known(probing.Mount(folder=folder, kind="tmpfs", device="tmpfs"), "x")
    )
    told = json.loads(cli("probe", "--json", "--dir", tmp_path).out)
    assert "lies in memory (tmpfs), on no disk" in told["unknown"]["measured.disk_bytes_per_s"]


@pytest.mark.parametrize("arguments", [("--dir", "/no/such/folder"), ("--dir", __file__)])
def test_a_folder_that_is_none_is_refused(cli, arguments):
    assert "--dir: got" in cli("probe", *arguments).refusal(2)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "read_survey", lambda: pytest.fail("it was asked"))
    assert "cannot write" in cli("probe", "-o", tmp_path).refusal()
    (tmp_path / "config.json").write_text("{}")
    assert "which is read" in cli("probe", "--dir", tmp_path, "-o", tmp_path / "config.json").refusal(2)


@pytest.mark.parametrize("stage", ["measure_memory", "save_rates"])
def test_an_interrupt_leaves_the_file_as_it_was(cli, tmp_path, on_host, monkeypatch, stage):
    on_host(put_host(tmp_path / "host"))
    (tmp_path / "rates.json").write_text("before")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    if stage == "measure_memory":
        monkeypatch.setattr(measuring, stage, interrupted)
    else:
        monkeypatch.setattr("hotsplit.files.os.replace", interrupted)
    result = cli("probe", "-o", tmp_path / "rates.json")
    assert (130, "") == (result.code, result.out)
    assert "before" == (tmp_path / "rates.json").read_text()
    assert ["host", "rates.json"] == sorted(path.name for path in tmp_path.iterdir())


def test_what_takes_long_is_told_before_it_begins(cli, tmp_path, on_host, with_cuda):
    root = server(tmp_path)
    put(root, {"x": ""})
    on_host(root, nvml=FakeNvml(nvml_gpu(), nvml_gpu("00000000:98:00.0")))
    with_cuda(GPU0, GPU1)
    lines = [line for line in cli("probe").err.splitlines() if line.startswith("measuring")]
    assert ["host memory, some seconds", "GPU 0 of 2", "GPU 1 of 2", "all 2 GPUs at once, some seconds"] == [
        line.removeprefix("measuring ").partition(":")[0] for line in lines
    ]


def test_gpus_of_the_host_that_a_container_was_not_given_are_not_in_the_file(cli, tmp_path, on_host):
    on_host(server(tmp_path / "host"), nvml=FakeNvml(nvml_gpu("00000000:98:00.0", Name="given")))
    told = json.loads(cli("probe", "--no-measure", "--json").out)
    assert 2 == len(told["gpus"])
    assert ["given"] == [gpu["name"] for gpu in told["rates"]["gpus"]]


def test_a_torch_that_cannot_be_imported_is_a_reason(cli, tmp_path, on_host, monkeypatch):
    on_host(server(tmp_path), nvml=FakeNvml(nvml_gpu()))

    def broken(name):
        assert "torch" == name
        raise OSError("libcudart.so.12: cannot open shared object file")

    library = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name), import_module=broken)
    monkeypatch.setattr(measuring, "importlib", library)
    result = cli("probe", "--json")
    assert 0 == result.code
    assert "libcudart" in json.loads(result.out)["unknown"]["gpus[0].hbm_bytes_per_s"]
