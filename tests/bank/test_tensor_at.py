"""Tensors over memory by address: no copy, the named device, nothing left behind."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hotsplit.bank import tensor_at
from hotsplit.bank.tensor_at import DeviceTensors, cpu_tensor
from hotsplit.errors import BankError


def test_a_tensor_is_the_memory_and_no_copy_of_it():
    memory = (ctypes.c_ubyte * 4096)()
    held = cpu_tensor(ctypes.addressof(memory) + 64, num_bytes=1024)
    held.fill_(3)
    memory[64] = 7
    assert (ctypes.addressof(memory) + 64, 1024, torch.uint8) == (held.data_ptr(), held.nbytes, held.dtype)
    assert ([0, 7, 3], [3, 0]) == (list(memory[63:66]), list(memory[64 + 1023 : 64 + 1025]))
    assert [0x03030307] == held.view(torch.int32)[:1].tolist()


def test_a_tensor_outlives_what_made_it_and_many_are_given_back():
    memory = (ctypes.c_ubyte * 64)(*range(64))
    before = resident_bytes()
    for _ in range(50_000):
        held = cpu_tensor(ctypes.addressof(memory), num_bytes=64)
    assert list(range(64)) == held.tolist()
    assert 50_000 * ctypes.sizeof(tensor_at._ManagedTensor) / 2 > resident_bytes() - before


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def test_the_struct_is_laid_out_as_dlpack_has_it():
    fields = {name: getattr(tensor_at._ManagedTensor, name).offset for name, _ in tensor_at._ManagedTensor._fields_}
    expected = {
        "data": 0, "device_kind": 8, "device_index": 12, "num_dimensions": 16, "code": 20, "bits": 21, "lanes": 22,
        "shape": 24, "strides": 32, "byte_offset": 40, "manager": 48, "deleter": 56, "extent": 64,
    }  # fmt: skip
    assert expected == fields


def test_a_copy_instead_of_the_memory_is_refused(monkeypatch):
    real = torch.utils.dlpack.from_dlpack
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule: real(capsule).clone())
    memory = (ctypes.c_ubyte * 64)()
    with pytest.raises(BankError, match="got a copy of it; wanted the memory itself"):
        cpu_tensor(ctypes.addressof(memory), num_bytes=64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has a device")
def test_a_tensor_of_a_device_is_told_to_torch_as_one():
    memory = (ctypes.c_ubyte * 64)()
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        DeviceTensors(0)(ctypes.addressof(memory), num_bytes=64)


@pytest.mark.gpu
def test_a_tensor_of_a_device_is_the_devices_own_memory():
    owner = torch.zeros(1024, dtype=torch.uint8, device="cuda:0")
    held = DeviceTensors(0)(owner.data_ptr() + 256, num_bytes=256)
    held.fill_(5)
    assert (owner.device, 5 * 256) == (held.device, int(owner.sum()))
