"""Where a model computes: what a user may ask for, and what is said where it is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hotsplit
from hotsplit.engines.transformers import places
from hotsplit.engines.transformers.places import place_of
from hotsplit.errors import ConfigError

pytestmark = pytest.mark.transformers


@pytest.fixture
def gpus(monkeypatch):
    """gpus(2) -> torch sees so many."""

    def see(number, *, integrated=()):
        properties = [SimpleNamespace(is_integrated=index in integrated) for index in range(number)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    see(0)
    return see


def test_without_a_word_it_is_a_gpu_where_there_is_one(gpus):
    assert None is place_of(None)
    gpus(2)
    assert torch.device("cuda", 0) == place_of(None).device


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_can_be_asked_for(gpus, device):
    gpus(1)
    assert None is place_of(device)


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)])
def test_a_gpu_can_be_asked_for(gpus, device, index):
    gpus(2)
    assert torch.device("cuda", index) == place_of(device).device


@pytest.mark.parametrize(
    ("device", "got"),
    [
        ("cuda", "got (a build of torch without CUDA|no CUDA device that torch can use)"),
        ("mps", "got a device that has no rows here"),
        ("meta", "got a device that has no rows here"),
        ("gpu", "got no device's name"),
        ("cuda:x", "got no device's name"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_error(gpus, device, got):
    with pytest.raises(ConfigError, match=f"device {device}: {got}; wanted cpu, or the cuda device.*or use cpu"):
        place_of(device)


def test_a_gpu_beyond_the_last_is_one_clear_error(gpus):
    gpus(2)
    with pytest.raises(ConfigError, match="device cuda:2: got 2 CUDA devices"):
        place_of("cuda:2")
    gpus(1)
    with pytest.raises(ConfigError, match="device cuda:1: got 1 CUDA device;"):
        place_of("cuda:1")


def test_a_build_for_another_makers_gpus_counts_as_none(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(torch.version, "hip", "6.2", raising=False)
    assert None is place_of(None)
    with pytest.raises(ConfigError, match="got a build of torch for AMD GPUs"):
        place_of("cuda")


def test_load_refuses_it_before_it_looks_at_the_model(gpus, tmp_path):
    with pytest.raises(ConfigError, match="device cuda: "):
        hotsplit.load(tmp_path / "absent", device="cuda")


def test_free_memory_is_asked_for_when_it_is_needed(gpus, monkeypatch):
    gpus(1)
    asked = []
    monkeypatch.setattr(places, "device_memory", asked.append)
    place = place_of("cuda")
    assert [] == asked
    place.memory()
    assert [torch.device("cuda", 0)] == asked


def test_without_a_word_it_is_no_gpu_whose_memory_is_the_hosts_which_is_said(gpus, caplog):
    caplog.set_level("INFO", logger=places.__name__)
    gpus(2, integrated={0})
    assert torch.device("cuda", 1) == place_of(None).device
    assert ["cuda:0 is passed over: it is integrated, and its memory is the host's"] == caplog.messages
    gpus(1, integrated={0})
    assert None is place_of(None)


@pytest.mark.parametrize("device", ["cuda:256", "cuda:257", "cuda:128", torch.device("cuda", 128)], ids=repr)
def test_a_number_that_torch_keeps_eight_bits_of_is_no_other_gpu(gpus, device):
    gpus(2)
    with pytest.raises(ConfigError, match=f"device {device}: got 2 CUDA devices"):
        place_of(device)
