"""Streams: torch's are asked for what the swaps need and no more, and the simulated ones run as a device's do."""

from __future__ import annotations

import gc
import inspect
import weakref

import numpy as np
import pytest
import torch

from hotsplit.bank.driver import Driver
from hotsplit.bank.fake_driver import FakeDriver
from hotsplit.bank.sim_streams import SimMemory, SimStreams
from hotsplit.bank.streams import StreamCalls, Streams, TorchStreams
from hotsplit.errors import BankError


class FakeEvent:
    """Done when the test says so."""

    def __init__(self, stream):
        self.stream, self.is_done = stream, False

    def query(self):
        return self.is_done


class FakeStream:
    """Logs what torch.cuda.Stream would have done."""

    def __init__(self, device=None, *, handle=77):
        self.device, self.cuda_stream, self.log = device, handle, []

    def record_event(self):
        event = FakeEvent(self)
        self.log.append(("record", weakref.ref(event)))
        return event

    def wait_event(self, event):
        self.log.append(("wait", event))

    def wait_stream(self, stream):
        self.log.append(("behind", stream))

    def synchronize(self):
        self.log.append(("synchronize",))


class FakeTorch:
    """What stands in for torch.cuda: one current stream, and the device that it was asked for."""

    def __init__(self):
        self.current, self.is_capturing, self.devices = FakeStream(handle=5), False, []

    def current_stream(self, device):
        self.devices.append(device)
        return self.current


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeTorch()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    return cuda


def methods(protocol):
    return [name for name in vars(protocol) if not name.startswith("_")]


def parameters(function):
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("streams", [TorchStreams, SimStreams])
@pytest.mark.parametrize("name", methods(Streams))
def test_both_kinds_of_streams_have_what_the_protocol_says(streams, name):
    assert parameters(getattr(Streams, name)) == parameters(getattr(streams, name))


@pytest.mark.parametrize("calls", [Driver, SimStreams, SimMemory])
@pytest.mark.parametrize("name", methods(StreamCalls))
def test_a_driver_and_the_simulated_streams_take_the_same_calls(calls, name):
    assert parameters(getattr(StreamCalls, name)) == parameters(getattr(calls, name))


# Streams of torch.


def test_the_side_stream_is_one_of_the_devices_own_and_side_out_is_the_same(cuda):
    streams = TorchStreams(3)
    assert (77, 77, 5) == tuple(streams.handle(name) for name in ("side", "side_out", "compute"))
    assert (3, [3]) == (streams._side.device, cuda.devices)


def test_the_default_stream_goes_by_the_name_that_no_setting_changes(cuda):
    cuda.current = FakeStream(handle=0)
    assert 1 == TorchStreams(0).handle("compute")


def test_every_record_makes_a_fresh_event_on_its_stream(cuda):
    streams = TorchStreams(0)
    events = [streams.record("compute"), streams.record("compute"), streams.record("side")]
    assert [cuda.current, cuda.current, streams._side] == [event.stream for event in events]
    assert 3 == len({id(event) for event in events})


def test_a_wait_and_a_query_are_the_events(cuda):
    streams = TorchStreams(0)
    event = streams.record("side")
    streams.wait("compute", event)
    before = streams.query(event)
    event.is_done = True
    assert ([("wait", event)], False, True) == (cuda.current.log, before, streams.query(event))


def test_an_event_that_is_not_done_lives_on_when_everybody_has_forgotten_it(cuda):
    streams = TorchStreams(0)
    event = streams.record("side")
    alive = weakref.ref(event)
    del event
    streams.record("compute")
    gc.collect()
    assert alive() is not None
    alive().is_done = True
    streams.record("compute")
    gc.collect()
    assert alive() is None


def test_a_stream_that_becomes_current_is_ordered_behind_the_one_before_it(cuda):
    streams, first = TorchStreams(0), cuda.current
    streams.handle("compute")
    cuda.current = second = FakeStream(handle=6)
    assert (6, 6) == (streams.handle("compute"), streams.handle("compute"))
    assert ([], [("behind", first)]) == (first.log, second.log)
    cuda.current = first
    streams.record("compute")
    assert [("behind", second), "record"] == [first.log[0], first.log[1][0]]


def test_a_capture_is_told_and_nothing_is_enqueued_to_find_out(cuda):
    streams = TorchStreams(0)
    cuda.is_capturing = True
    assert (True, [], []) == (streams.is_capturing(), cuda.current.log, cuda.devices)


def test_synchronizing_waits_for_that_stream_alone(cuda):
    streams = TorchStreams(0)
    streams.synchronize("side")
    assert ([("synchronize",)], []) == (streams._side.log, cuda.current.log)


@pytest.mark.gpu
def test_an_event_of_a_device_is_done_when_its_stream_has_come_to_it():
    streams = TorchStreams(0)
    event = streams.record("side")
    streams.wait("compute", event)
    streams.synchronize("side")
    assert (True, False) == (streams.query(event), streams.is_capturing())
    assert streams.handle("side") != streams.handle("compute") != 0


# Simulated streams.


def small(content=b"abcd....", **options):
    """Streams over a few bytes at address 4096."""
    memory = SimMemory(content, address=4096)
    return SimStreams(memory, **options), memory


def enqueue_copy(streams, *, stream="side", num_bytes=4):
    streams.copy(4100, source=4096, num_bytes=num_bytes, stream=streams.handle(stream))


def test_nothing_runs_before_the_caller_says_so():
    streams, memory = small()
    enqueue_copy(streams)
    streams.write32(4096, value=0, stream=streams.handle("compute"))
    event = streams.record("side")
    assert (b"abcd....", False) == (memory.content, streams.query(event))


@pytest.mark.parametrize(
    ("num_chunks", "expected"),
    [
        (1, [b"abcd"]),
        (2, [b"ab..", b"abcd"]),
        (3, [b"ab..", b"abcd"]),
        (4, [b"a...", b"ab..", b"abc.", b"abcd"]),
        (9, [b"a...", b"ab..", b"abc.", b"abcd"]),
    ],
)
def test_a_copy_goes_chunk_by_chunk(num_chunks, expected):
    streams, memory = small(num_chunks=num_chunks)
    enqueue_copy(streams)
    seen = []
    while streams.enabled():
        streams.advance("side")
        seen.append(memory.content[4:])
    assert expected == seen


def test_a_copy_reads_what_is_there_when_its_turn_comes():
    streams, memory = small(num_chunks=2)
    enqueue_copy(streams)
    streams.advance("side")
    memory.content = b"ABCD" + memory.content[4:]
    streams.advance("side")
    assert b"ABCDabCD" == memory.content


def test_a_write_takes_its_value_when_it_is_enqueued_and_negative_ones_wrap():
    streams, memory = small()
    for value in (258, -1):
        streams.write32(4100, value=value, stream=streams.handle("compute"))
    streams.advance("compute")
    assert b"abcd\x02\x01\0\0" == memory.content
    streams.advance("compute")
    assert b"abcd\xff\xff\xff\xff" == memory.content


def test_work_of_one_stream_runs_in_order_and_other_streams_do_not_wait():
    streams, _ = small()
    streams.launch_step()
    enqueue_copy(streams)
    enqueue_copy(streams, stream="side_out")
    assert (("compute", "side", "side_out"), 1, 2) == (streams.enabled(), streams.num_steps(), streams.num_copies())


def test_a_step_runs_for_a_while():
    streams, _ = small()
    streams.launch_step()
    seen = [streams.is_stepping()]
    while streams.enabled():
        streams.advance("compute")
        seen.append(streams.is_stepping())
    assert ([False, True, False], 0) == (seen, streams.num_steps())


def test_a_wait_holds_its_stream_until_the_event_is_done():
    streams, _ = small()
    enqueue_copy(streams)
    event = streams.record("side")
    streams.wait("compute", event)
    assert (("side",), False) == (streams.enabled(), streams.query(event))
    streams.advance("side")
    assert (("side",), False) == (streams.enabled(), streams.query(event))
    streams.advance("side")
    assert (("compute",), True) == (streams.enabled(), streams.query(event))


def test_synchronizing_runs_a_stream_and_what_it_waits_for_and_no_more():
    streams, memory = small()
    streams.launch_step()
    streams.wait("side", streams.record("compute"))
    enqueue_copy(streams)
    streams.launch_step()
    streams.synchronize("side")
    assert (b"abcdabcd", 1) == (memory.content, streams.num_steps())


@pytest.mark.parametrize("end", [lambda streams: streams.drain(), lambda streams: streams.synchronize("side")])
def test_streams_that_wait_for_each_other_are_a_deadlock(end):
    streams, _ = small()
    streams.wait("side", 0)
    assert 0 == streams.record("side")
    with pytest.raises(BankError, match="deadlock"):
        end(streams)


def test_a_stream_that_cannot_go_on_is_not_advanced():
    streams, _ = small()
    with pytest.raises(BankError, match="simulated stream side: got nothing to run; wanted one of enabled"):
        streams.advance("side")


def test_the_chosen_copy_is_refused_when_it_is_asked_for_and_leaves_nothing_behind():
    streams, memory = small(failing_copies=[1])
    enqueue_copy(streams, num_bytes=2)
    with pytest.raises(BankError, match="cuMemcpyAsync: got CUDA_ERROR_OUT_OF_MEMORY"):
        enqueue_copy(streams)
    streams.drain()
    assert b"abcdab.." == memory.content
    enqueue_copy(streams)
    streams.drain()
    assert b"abcdabcd" == memory.content


@pytest.mark.parametrize("handle", [0, 4, -1])
@pytest.mark.parametrize(
    "call",
    [
        lambda streams, handle: streams.copy(4100, source=4096, num_bytes=4, stream=handle),
        lambda streams, handle: streams.write32(4100, value=1, stream=handle),
    ],
)
def test_a_stream_that_does_not_exist_is_refused(call, handle):
    streams, _ = small()
    with pytest.raises(BankError, match=f"CUDA_ERROR_INVALID_HANDLE .stream {handle}"):
        call(streams, handle)


@pytest.mark.parametrize(
    "call",
    [
        lambda streams: streams.record("compute"),
        lambda streams: streams.wait("compute", 0),
        lambda streams: streams.query(0),
        enqueue_copy,
        lambda streams: streams.write32(4100, value=1, stream=1),
    ],
)
def test_a_call_that_would_break_a_capture_is_refused(call):
    streams, _ = small()
    with streams.capture(), pytest.raises(BankError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        call(streams)
    assert (True, False) == (streams.is_empty(), streams.is_capturing())


@pytest.mark.parametrize("address", [4095, 4097, 5000])
def test_bytes_outside_of_the_memory_are_refused(address):
    memory = SimMemory(b"12345678", address=4096)
    with pytest.raises(BankError, match=f"CUDA_ERROR_ILLEGAL_ADDRESS .8 bytes at {address}"):
        memory.copy(4096, source=address, num_bytes=8, stream=1)
    with pytest.raises(BankError, match="4 bytes at 4101"):
        memory.write32(4101, value=0, stream=1)


def test_over_a_driver_the_bytes_are_those_that_numpy_sees_and_its_rules_hold():
    driver, values_N = FakeDriver(), np.arange(8, dtype=np.uint8)
    streams = SimStreams(driver, num_chunks=2)
    address = values_N.ctypes.data
    streams.copy(address + 4, source=address, num_bytes=4, stream=streams.handle("side"))
    streams.advance("side")
    assert [0, 1, 2, 3, 0, 1, 6, 7] == values_N.tolist()
    streams.drain()
    copies = [call.values["stream"] for call in driver.calls if call.name == "cuMemcpyAsync"]
    assert ([0, 1, 2, 3] * 2, [streams.handle("side")] * 2) == (values_N.tolist(), copies)
    streams.write32(address + 1, value=1, stream=streams.handle("compute"))
    with pytest.raises(BankError, match="address of no word"):
        streams.advance("compute")


def test_a_fork_goes_its_own_way():
    streams, memory = small(num_chunks=2)
    enqueue_copy(streams)
    streams.advance("side")
    twin_memory = memory.fork()
    twin = streams.fork(twin_memory)
    assert streams.key() == twin.key()
    twin.drain()
    assert (b"abcdab..", b"abcdabcd", False) == (memory.content, twin_memory.content, streams.is_empty())
    assert streams.key() != twin.key()


def test_states_with_equal_futures_have_equal_keys_whatever_their_events_were_called():
    young, old = small()[0], small()[0]
    old.record("side")
    old.drain()
    events = []
    for streams in (young, old):
        events.append(streams.record("side"))
        streams.wait("compute", events[-1])
    assert (young.key(), young.event_key(events[0])) == (old.key(), old.event_key(events[1]))
    assert (("side", 0), "done") == (old.event_key(events[1]), old.event_key(0))


def test_copies_that_will_be_refused_tell_states_apart_only_until_they_are():
    streams = [small(failing_copies=[1])[0] for _ in range(2)]
    enqueue_copy(streams[0])
    streams[0].drain()
    assert streams[0].key() != streams[1].key()
    for one in streams:
        while one._num_asked < 4:
            try:
                enqueue_copy(one)
            except BankError:
                continue
        one.drain()
    enqueue_copy(streams[0])
    streams[0].drain()
    assert streams[0].key() == streams[1].key()
