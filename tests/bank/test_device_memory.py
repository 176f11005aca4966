from __future__ import annotations

import torch

from hotsplit.bank.device_memory import DeviceMemory, device_memory


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert DeviceMemory(free_bytes=140, total_bytes=1000) == device_memory(torch.device("cuda", 0))
