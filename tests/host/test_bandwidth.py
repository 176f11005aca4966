from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from host import numa_trees as trees
from hotsplit.host import bandwidth
from hotsplit.host.bandwidth import measure_memory, read_pass_s
from hotsplit.host.cpu import usable_cpus
from hotsplit.host.numa import read_nodes
from hotsplit.units import GIB, MIB

WORDS = np.zeros(8 * 2**20, dtype=np.int64)


def test_host_memory_is_read_at_a_rate_that_memory_can_have():
    found = measure_memory(read_nodes(), available_bytes=GIB, passes=2, sample_bytes=64 * MIB)
    assert 1e8 < found.total.value < 2e13
    assert "best of 2 passes" in found.total.source


def test_with_too_little_memory_the_rate_is_unknown_and_says_so():
    found = measure_memory((), available_bytes=100 * MIB)
    assert None is found.total.value
    assert "too little to read" in found.total.reason


def test_what_is_available_bounds_the_sample(monkeypatch):
    asked = []

    def pages(num_bytes, **_):
        asked.append(num_bytes)
        raise bandwidth.BankError("host memory", got="none left")

    monkeypatch.setattr(bandwidth, "HostPages", pages)
    found = measure_memory((), available_bytes=512 * MIB)
    assert [128 * MIB] == asked
    assert "none left" in found.total.reason


def test_every_byte_is_read_once(monkeypatch):
    seen = []

    class Chunk:
        def __init__(self, start):
            self.start = start

        def max(self):
            seen.append(self.start)

    monkeypatch.setattr(bandwidth, "_chunks", lambda words: [Chunk(i) for i in range(40)])
    assert 0 < read_pass_s([(WORDS, usable_cpus()), (WORDS, usable_cpus())])
    assert sorted([*range(40)] * 2) == sorted(seen)


def test_each_node_is_read_by_its_own_cpus_and_all_together(tmp_path, monkeypatch):
    trees.put_node(tmp_path, 0, cpus="0-31", total_gib=64, distances="10 21")
    trees.put_node(tmp_path, 1, cpus="32-63", total_gib=64, distances="21 10")
    trees.put_node(tmp_path, 2, cpus="", total_gib=96, distances="80 80")
    monkeypatch.setattr(bandwidth, "usable_cpus", lambda: tuple(range(16, 48)))
    read = []

    def pass_s(samples):
        read.append([(words.nbytes, tuple(cpus)) for words, cpus in samples])
        return 0.5 / len(samples)

    monkeypatch.setattr(bandwidth, "read_pass_s", pass_s)
    nodes = read_nodes(tmp_path)
    found = measure_memory(nodes, available_bytes=GIB, root=tmp_path, passes=1)
    first, second = (128 * MIB, tuple(range(16, 32))), (128 * MIB, tuple(range(32, 48)))
    assert [[first, second], [first], [second]] == read
    assert 2 * 128 * MIB / 0.25 == found.total.value
    assert {0: 128 * MIB / 0.5, 1: 128 * MIB / 0.5} == {number: rate.value for number, rate in found.nodes.items()}


def test_nobody_reads_any_more_when_a_pass_was_interrupted(monkeypatch):
    """Else memory would be given back under a thread that reads it."""
    before = set(threading.enumerate())
    monkeypatch.setattr(bandwidth, "_chunks", lambda words: itertools.repeat(WORDS))
    joined = threading.Thread.join
    calls = []

    def join(thread, timeout=None):
        calls.append(thread)
        if len(calls) == 1:
            raise KeyboardInterrupt
        joined(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        read_pass_s([(WORDS, usable_cpus())])
    assert set(threading.enumerate()) <= before
