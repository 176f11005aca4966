"""CASES T11: whole hosts, as the probe reads them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host import numa_trees as trees
from host.host_trees import GIB, FakeNvml, fixture, nvml_gpu, put, put_gpu, put_group_v2, put_host, tools
from hotsplit.host.asking import known, unknown
from hotsplit.host.survey import read_survey

YES = known("yes", "test")
REFUSED = unknown("memory cannot be placed (mbind: Operation not permitted; in a container, --cap-add SYS_NICE)")
NO_NVML = "the package nvidia-ml-py is not installed"
GPU0, GPU1 = "0000:17:00.0", "0000:98:00.0"


def names(survey):
    return [notice.name for notice in survey.notices]


def server(root):
    """Two sockets, a GPU on each; the second hangs on a bridge with 4 lanes."""
    put_host(root)
    trees.put_node(root, 0, cpus="0-3", total_gib=256, free_gib=200, distances="10 21")
    trees.put_node(root, 1, cpus="4-7", total_gib=256, free_gib=100, distances="21 10")
    put_gpu(root, ("pci0000:16", "0000:16:01.0", GPU0), node=0)
    put_gpu(root, ("pci0000:97", "0000:97:01.0", GPU1), node=1, bridges={"0000:97:01.0": ("32.0 GT/s PCIe", 4)})
    return root


def test_a_server_is_told_whole_without_nvml(tmp_path):
    survey = read_survey(root=server(tmp_path), tool=tools(x=fixture("smi_two_h200.xml")), nvml=NO_NVML, can_place=YES)
    assert [("NVIDIA H200", 0), ("NVIDIA H200", 1)] == [
        (gpu.name.value, gpu.numa_node.value) for gpu in survey.gpus.gpus
    ]
    assert {0: 0, 1: 1} == {index: node.value for index, node in survey.topology.cold_nodes.items()}
    assert "SYS" == survey.topology.relations[0, 1].value
    assert 400 * GIB == survey.budget.num_bytes
    assert ["link-narrowed", "link-behind-slower"] == names(survey)
    assert "bridge 0000:97:01.0, a PCIe link of generation 5 x4: 15.8 GB/s at most" in survey.notices[-1].text


def test_nvidia_smi_is_not_run_where_nvml_tells_everything_of_one_gpu(tmp_path):
    put_host(tmp_path)
    asked = []

    def tool(command):
        asked.append(command)
        return tools()(command)

    read_survey(root=tmp_path, tool=tool, nvml=FakeNvml(nvml_gpu()), can_place=YES)
    assert [("numastat",)] == asked


def test_in_a_container_the_limit_clamps_and_a_refused_placement_is_told(tmp_path):
    root = trees.two_sockets(put_host(tmp_path))
    put(root, {".dockerenv": ""})
    cache = int(68.9 * GIB)
    put_group_v2(root, limit=70 * GIB, used=70 * GIB, stat=f"active_file {cache}\ninactive_file 0")
    survey = read_survey(root=root, tool=tools(), nvml=NO_NVML, can_place=REFUSED)
    assert cache == survey.budget.num_bytes
    assert "docker run --memory SIZE" in survey.budget.binding.do
    assert "SYS_NICE" in survey.topology.can_place.reason
    assert () == survey.gpus.gpus


def test_a_virtual_machine_with_a_silent_gpu_says_what_it_cannot_know(tmp_path):
    root = put_host(tmp_path)
    trees.put_node(root, 0, cpus="0-7", total_gib=512, distances="10")
    put_gpu(root, ("pci0000:00", "0000:00:05.0"), node=-1, link=("Unknown", 0), most=("Unknown", 0))
    survey = read_survey(root=root, tool=tools(), nvml=NO_NVML, can_place=YES)
    (gpu,) = survey.gpus.gpus
    for answer in (gpu.name, gpu.memory_bytes, gpu.link.generation, gpu.link.width, gpu.numa_node):
        assert None is answer.value
        assert answer.reason
    assert 0 == survey.topology.cold_nodes[0].value


def test_on_grace_cold_rows_go_to_the_processors_memory(tmp_path):
    root = trees.grace(put_host(tmp_path))
    survey = read_survey(root=root, tool=tools(), nvml=FakeNvml(nvml_gpu("00000029:01:00.0")), can_place=YES)
    assert 1 == survey.topology.cold_nodes[0].value
    assert "numa-nearest-node" in names(survey)


def test_huge_pages_that_are_off_or_idle_are_said(tmp_path):
    root = put_host(tmp_path)
    put(root, {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": 1024,
    })  # fmt: skip
    survey = read_survey(root=root, tool=tools(), nvml=NO_NVML, can_place=YES)
    assert ["no-huge-pages", "huge-pages-idle"] == names(survey)
    assert "2.000 GiB" in survey.notices[1].text


def test_a_host_that_tells_nothing_at_all_is_unknown_throughout(tmp_path):
    survey = read_survey(root=tmp_path, tool=tools(), nvml=NO_NVML, can_place=YES)
    answers = [survey.total, survey.cpu.model, survey.cpu.usable, survey.huge_pages.mode, survey.container.kernel]
    answers += [survey.container.wsl, survey.container.capabilities, survey.topology.stats, survey.gpus.driver]
    assert [None] * len(answers) == [one.value for one in answers]
    assert all(one.reason for one in answers)
    assert None is survey.budget.num_bytes


def files_below(root):
    return sorted(
        os.path.join(folder, name) for folder, _, found in os.walk(root) for name in found if "/bus/" not in folder
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_garbage_in_any_file_is_never_an_error_nor_a_zero(tmp_path, data):
    root = tmp_path / "host"
    if not root.exists():
        put_group_v2(server(root), limit=70 * GIB, used=GIB, stat="active_file 0\ninactive_file 0")
    path = data.draw(st.sampled_from(files_below(root)))
    with open(path, "rb") as file:
        before = file.read()
    with open(path, "wb") as file:
        file.write(data.draw(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode))))
    try:
        survey = read_survey(
            root=root, tool=tools(), nvml=FakeNvml(nvml_gpu(), nvml_gpu("00000000:98:00.0")), can_place=YES
        )
    finally:
        with open(path, "wb") as file:
            file.write(before)
    assert 0 != survey.total.value
    assert 0 not in [gpu.memory_bytes.value for gpu in survey.gpus.gpus]
    assert all(one.room.reason for one in survey.budget.limits if one.room.value is None)


def test_a_tool_that_gives_no_answer_is_asked_once(tmp_path):
    asked = []

    def hangs(command):
        asked.append(command[0])
        return unknown(f"{command[0]} gave no answer in 30 s")

    survey = read_survey(root=server(tmp_path), tool=hangs, nvml=NO_NVML, can_place=YES)
    assert 2 == len(survey.gpus.gpus)
    assert 1 == asked.count("nvidia-smi")
    assert "SYS" == survey.topology.relations[0, 1].value
