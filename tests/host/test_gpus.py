from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.host_trees import FakeNvml, FakeNvmlError, Struct, fixture, nvml_gpu, put, put_gpu, tools
from hotsplit.host.gpus import bus_ids, read_gpus, read_link_now, smi_tool
from hotsplit.host.nvml import read_nvml, read_nvml_link
from hotsplit.host.smi import parse_query, read_matrix, read_smi

NO_NVML = "the package nvidia-ml-py is not installed"
GPU0, GPU1 = "0000:17:00.0", "0000:98:00.0"


def nothing_is_zero(gpus):
    """Every unknown has a reason, and no value is a 0 that means unknown."""
    for gpu in gpus:
        answers = [gpu.name, gpu.memory_bytes, gpu.link.generation, gpu.link.width, gpu.link.max_width, gpu.numa_node]
        assert [] == [one for one in answers if (one.value is None) != bool(one.reason)]
        assert 0 not in [gpu.memory_bytes.value, gpu.link.generation.value, gpu.link.width.value]
    return True


def test_nvidia_smi_tells_name_memory_and_link():
    found = parse_query(fixture("smi_two_h200.xml"))
    assert "570.86.15" == found.driver.value
    first, second = found.gpus
    assert (GPU0, "NVIDIA H200", 143771 * 2**20) == (first.bus_id, first.name.value, first.memory_bytes.value)
    assert (1, 16, 5, 16) == tuple(
        one.value for one in (first.link.generation, first.link.width, first.link.max_generation, first.link.max_width)
    )
    assert (8, True) == (second.link.width.value, second.link.is_narrowed)
    assert nothing_is_zero(found.gpus)


def test_a_gpu_with_the_hosts_memory_has_unknown_memory_and_no_link():
    (gpu,) = parse_query(fixture("smi_unified.xml")).gpus
    assert ("000f:01:00.0", "NVIDIA GB10") == (gpu.bus_id, gpu.name.value)
    assert None is gpu.memory_bytes.value
    assert nothing_is_zero([gpu])


def test_odd_values_are_unknown_and_a_gpu_without_a_place_is_none():
    found = parse_query(fixture("smi_odd.xml"))
    assert [GPU0] == [gpu.bus_id for gpu in found.gpus]
    assert None is found.driver.value
    assert None is found.gpus[0].link.bytes_per_s
    assert nothing_is_zero(found.gpus)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "<a>",
    ],
)
def test_sentences_instead_of_xml_are_a_reason(text):
    found = parse_query(text)
    assert () == found.gpus
    assert "no XML" in found.reason
    assert found.is_silent


@given(st.text(max_size=200))
def test_garbage_of_nvidia_smi_is_unknown(text):
    for found in (parse_query(text), parse_query(f"<nvidia_smi_log><gpu id='{GPU0}'>{text}</gpu></nvidia_smi_log>")):
        assert nothing_is_zero(found.gpus)
    matrix = read_matrix(text)
    assert (matrix.value is None) == bool(matrix.reason)


@given(st.data())
def test_a_damaged_answer_of_nvidia_smi_is_never_an_error_or_a_zero(data):
    name = data.draw(st.sampled_from(["smi_two_h200.xml", "smi_topology.txt"]))
    text = fixture(name)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=10)) + text[end:]
    assert nothing_is_zero(parse_query(damaged).gpus)
    assert all(isinstance(word, str) and word for word in (read_matrix(damaged).value or {"": "x"}).values())


def test_the_matrix_is_read_through_escapes_and_beside_other_columns():
    matrix = read_matrix(fixture("smi_topology.txt")).value
    assert ("NV18", "PXB", "SYS") == (matrix[0, 1], matrix[0, 2], matrix[0, 3])
    assert all(matrix[one, other] == matrix[other, one] for one, other in matrix)
    assert 12 == len(matrix)


def test_nvml_is_asked_first_and_is_enough():
    module = FakeNvml(nvml_gpu(), nvml_gpu(b"00000000:98:00.0", Name=b"NVIDIA H100"), driver=b"535.1")
    found = read_nvml(module)
    assert "535.1" == found.driver.value
    assert ["NVIDIA H200", "NVIDIA H100"] == [gpu.name.value for gpu in found.gpus]
    assert [GPU0, GPU1] == [gpu.bus_id for gpu in found.gpus]
    assert 0 == module.starts  # what was started was ended
    assert nothing_is_zero(found.gpus)


@pytest.mark.parametrize(
    "value", [FakeNvmlError("Not Supported"), None, 0, -1, "5", 99, True, Struct(), Struct(total=0)]
)
def test_what_nvml_does_not_tell_is_unknown_with_its_word(value):
    names = ("MemoryInfo", "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")
    (gpu,) = read_nvml(FakeNvml(nvml_gpu(**dict.fromkeys(names, value)))).gpus
    assert (None, None) == (gpu.memory_bytes.value, gpu.link.generation.value)
    assert nothing_is_zero([gpu])


@pytest.mark.parametrize("module", [NO_NVML, FakeNvml(init=FakeNvmlError("Driver Not Loaded")), Struct()])
def test_an_nvml_that_does_not_start_is_a_reason(module):
    found = read_nvml(module)
    assert () == found.gpus
    assert found.is_silent
    assert found.reason
    assert None is read_nvml_link(module, GPU0, is_loaded=True).generation.value


def test_nvidia_smi_fills_in_what_nvml_does_not_tell(tmp_path):
    module = FakeNvml(nvml_gpu(MemoryInfo=FakeNvmlError("Not Supported")))
    found = read_gpus(root=tmp_path, tool=tools(x=fixture("smi_two_h200.xml")), nvml=module)
    assert [(GPU0, 143771 * 2**20), (GPU1, 143771 * 2**20)] == [
        (gpu.bus_id, gpu.memory_bytes.value) for gpu in found.gpus
    ]
    assert ["NVML", "nvidia-smi"] == [gpu.name.source for gpu in found.gpus]
    assert "nvidia-smi" == found.gpus[0].memory_bytes.source


def test_the_kernel_fills_in_links_bridges_and_nodes(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", "0000:16:01.0", GPU0), node=1, link=("16.0 GT/s PCIe", 16))
    module = FakeNvml(nvml_gpu(CurrPcieLinkGeneration=FakeNvmlError("Not Supported")))
    (gpu,) = read_gpus(root=tmp_path, tool=tools(), nvml=module).gpus
    assert (4, 1) == (gpu.link.generation.value, gpu.numa_node.value)
    assert ("pci0000:16", "0000:16:01.0") == gpu.path


def test_a_node_of_minus_one_is_unknown_unless_the_driver_knows_it(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", GPU0), node=-1)
    (gpu,) = read_gpus(root=tmp_path, tool=tools(), nvml=FakeNvml(nvml_gpu())).gpus
    assert None is gpu.numa_node.value
    assert "numa_node says -1" in gpu.numa_node.reason
    (gpu,) = read_gpus(root=tmp_path, tool=tools(), nvml=FakeNvml(nvml_gpu(NumaNodeId=1))).gpus
    assert 1 == gpu.numa_node.value


def test_a_gpu_for_which_no_driver_answers_is_told_with_the_reason(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", GPU0))
    put(
        tmp_path,
        {"sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086", "sys/bus/pci/devices/0000:00:02.0/class": "0x030000"},
    )
    assert (GPU0,) == bus_ids(tmp_path)
    found = read_gpus(root=tmp_path, tool=tools(), nvml=NO_NVML)
    assert found.is_silent
    (gpu,) = found.gpus
    assert f"unknown ({NO_NVML}; nvidia-smi is not installed)" == str(gpu.name)
    assert 5 == gpu.link.generation.value
    assert nothing_is_zero(found.gpus)


def test_a_host_without_any_gpu_has_none_and_says_who_was_asked(tmp_path):
    found = read_gpus(root=tmp_path, tool=tools(), nvml=NO_NVML)
    assert () == found.gpus
    assert f"{NO_NVML}; nvidia-smi is not installed" == found.reason == found.driver.reason


def test_the_tool_of_wsl_is_found_beside_the_path(tmp_path):
    put(tmp_path, {"usr/lib/wsl/lib/nvidia-smi": ""})
    asked = []

    def tool(command):
        asked.append(command[0])
        return tools()(command)

    read_smi(smi_tool(tool, root=tmp_path))
    assert ["nvidia-smi", str(tmp_path / "usr/lib/wsl/lib/nvidia-smi")] == asked


def test_a_link_under_load_is_told_as_such(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", GPU0), link=("32.0 GT/s PCIe", 16))
    by_nvml = read_link_now(
        GPU0, is_loaded=True, root=tmp_path, tool=tools(), nvml=FakeNvml(nvml_gpu(CurrPcieLinkGeneration=4))
    )
    assert (4, True) == (by_nvml.generation.value, by_nvml.is_loaded)
    by_kernel = read_link_now(GPU0, is_loaded=True, root=tmp_path, tool=tools(), nvml=NO_NVML)
    assert (5, True) == (by_kernel.generation.value, by_kernel.is_loaded)
    text = fixture("smi_two_h200.xml")
    by_tool = read_link_now(GPU1, is_loaded=True, root=tmp_path, tool=tools(x=text), nvml=NO_NVML)
    assert (5, 8, True) == (by_tool.generation.value, by_tool.width.value, by_tool.is_loaded)
    nobody = read_link_now("0000:99:00.0", is_loaded=True, root=tmp_path, tool=tools(x=text), nvml=FakeNvml(nvml_gpu()))
    assert "NVML knows no GPU at 0000:99:00.0" == nobody.generation.reason


def test_every_gpu_has_a_number_of_its_own_though_one_does_not_answer(tmp_path):
    put_gpu(tmp_path, ("pci0000:16", GPU0))
    put_gpu(tmp_path, ("pci0000:97", GPU1))
    lost = nvml_gpu(FakeNvmlError("GPU is lost"))
    for tool in (tools(), tools(x=fixture("smi_two_h200.xml"))):
        found = read_gpus(root=tmp_path, tool=tool, nvml=FakeNvml(lost, nvml_gpu("00000000:98:00.0")))
        numbers = {gpu.bus_id: gpu.index for gpu in found.gpus}
        assert {GPU0, GPU1} == set(numbers)
        assert 1 == numbers[GPU1]
        assert 2 == len(set(numbers.values()))


def test_a_gpu_without_a_place_is_counted_as_the_tools_table_counts_it():
    text = fixture("smi_two_h200.xml").replace("00000000:17:00.0", "[GPU is lost]")
    assert [(GPU1, 1)] == [(gpu.bus_id, gpu.index) for gpu in parse_query(text).gpus]
