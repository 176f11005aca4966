"""One GPU, over a stand-in: what surrounds a model there. Devices that fail, forks, ambient state, hotsplit switched off."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os

import pytest
import torch

import hotsplit
from engines import tiny
from engines.copies import until_swapped
from hotsplit.bank.device_banks import DeviceBanks
from hotsplit.bank.fake_driver import NOTHING
from hotsplit.engines.transformers import gpu
from hotsplit.plan.checkpoint import read_headers

pytestmark = pytest.mark.transformers

SWAPPING = {"dyn_steps": 2, "dyn_margin": 1, "dyn_half_life": 1}


# How it ends.


def test_what_was_counted_is_saved_though_the_device_fails(checkpoint, stand_in, tmp_path, monkeypatch, caplog):
    folder, machine = checkpoint("qwen3_moe"), stand_in()
    settings = {"run_when_fits": True, "hot_gib": 0.0005, "state_dir": tmp_path}
    model = hotsplit.load(folder, **settings)
    tiny.play(model)
    model.hotsplit.snapshot()

    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(model.hotsplit.banks.router, "settle", fail)
        model.hotsplit.close()
    assert NOTHING == machine.driver.held
    assert "the last counts cannot be read: CUDA error: unspecified launch failure" in caplog.messages
    again = hotsplit.load(folder, **settings)
    assert "no learned counts" not in again.hotsplit.origin
    again.hotsplit.close()


def test_a_forked_child_saves_and_closes_nothing_of_its_parents(checkpoint, load_on_gpu, monkeypatch, tmp_path):
    model = load_on_gpu(checkpoint("qwen3_moe"), dynamic=True, **SWAPPING)
    tiny.play(model)
    child = copy.copy(model.hotsplit)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        child.close()
    assert [] == [*(tmp_path / "state" / "learned").glob("*.json")]
    tiny.play(model)


# Whatever a caller's own code runs under.


class Current:
    """The current device of a thread, as torch and the driver keep it."""

    def __init__(self):
        self.device, self.seen = "the caller's", []

    @contextlib.contextmanager
    def on_device(self):
        before, self.device = self.device, "the banks'"
        try:
            yield
        finally:
            self.device = before

    def make_current(self):
        self.device = "the banks'"

    def synchronise(self):
        self.seen.append(self.device)


def test_a_callers_current_device_stays_what_it_was(checkpoint, load_on_gpu, monkeypatch):
    banks, current = load_on_gpu(checkpoint("qwen3_moe")).hotsplit.banks, Current()
    monkeypatch.setattr(DeviceBanks, "on_device", lambda banks: current.on_device())
    banks._kit = dataclasses.replace(banks._kit, make_current=current.make_current, synchronise=current.synchronise)
    banks.tick()
    assert "the caller's" == current.device
    banks.close()
    assert ("the caller's", ["the banks'"]) == (current.device, current.seen)


AMBIENT = {"a default device": lambda: torch.device("meta"), "inference mode": torch.inference_mode}


@pytest.mark.parametrize("ambient", AMBIENT.values(), ids=AMBIENT)
@pytest.mark.parametrize("place", ["a cpu", "a stand-in"])
def test_a_model_is_the_same_whatever_its_load_runs_under(checkpoint, expected, stand_in, load, place, ambient):
    folder = checkpoint("qwen3_moe", dtype=torch.float32)
    machine = stand_in() if place == "a stand-in" else None
    with ambient():
        model = load(folder, hot=0.75, **SWAPPING)
    for _ in range(3):
        assert expected(folder)[2].tolist() == tiny.play(model)[2].tolist()
    until_swapped(model, lambda: tiny.play(model))
    assert (machine is not None) == model.hotsplit.banks.name.startswith("cuda")


def test_the_proof_is_the_same_whatever_the_default_device(checkpoint, load_on_gpu, monkeypatch):
    shares, real = [], gpu.prove_rows

    def prove(*args, **kwargs):
        shares.append(real(*args, **kwargs))
        with torch.device("meta"):
            shares.append(real(*args, **kwargs))
        return shares[-1]

    monkeypatch.setattr(gpu, "prove_rows", prove)
    load_on_gpu(checkpoint("qwen3_moe"))
    assert 2 == len(shares)
    assert shares[0] == shares[1]


# Switched off.


@pytest.fixture
def moves(monkeypatch):
    """Devices that stock models are moved to."""
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: (moved.append(device), model)[1])
    return moved


@pytest.mark.parametrize(("device", "free_bytes"), [(None, 64 << 30), ("cuda", 1000)], ids=["fits", "asked for"])
def test_switched_off_a_model_goes_to_a_gpu_that_has_room_or_was_asked_for(
    checkpoint, stand_in, moves, caplog, device, free_bytes
):
    machine = stand_in(free_bytes=free_bytes)
    hotsplit.load(checkpoint("qwen3_moe"), enable=False, device=device)
    assert [machine.place().device] == moves
    assert ["[off]"] == [message[-5:] for message in caplog.messages if "running stock transformers [off]" in message]


def test_switched_off_a_model_that_no_gpu_holds_stays_on_the_cpu_which_is_said_once(
    checkpoint, stand_in, moves, caplog
):
    folder = checkpoint("qwen3_moe")
    needed = sum(info.nbytes for info in read_headers(folder).tensors.values())
    for spare, moved in ((0, 1), (-1, 1)):
        stand_in(free_bytes=2**30 + needed + spare)
        hotsplit.load(folder, enable=False, vram_reserve_gib=1)
        assert moved == len(moves)
    (line,) = [message for message in caplog.messages if "on the CPU" in message]
    assert "running stock transformers on the CPU, since cpu has" in line
