from __future__ import annotations

import torch

from hotsplit.bank.device_memory import DeviceMemory, device_memory


def test_what_torch_only_caches_is_given_back_before_the_driver_is_asked(monkeypatch):
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(140))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 1000))
    assert DeviceMemory(free_bytes=140, total_bytes=1000) == device_memory(torch.device("cuda", 0))
