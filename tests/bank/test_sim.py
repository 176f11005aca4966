"""The simulated backend finds every kind of fault by itself, and runs work as streams and events do."""

from __future__ import annotations

import pytest

from bank.explorer import exclusive, inclusive
from hotsplit.bank.sim import NOBODY, SimBackend, SimViolation
from hotsplit.errors import BankError, SwapError


def test_a_copy_moves_the_parts_of_a_row_one_after_the_other():
    backend = SimBackend([exclusive(2, hot=1)], num_tensors=2, num_chunks=1)
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    seen = [backend.owners(0, row=1)]
    while backend.enabled():
        backend.advance("side")
        seen.append(backend.owners(0, row=1))
    assert [(NOBODY, NOBODY), (1, NOBODY), (1, 1)] == seen


def test_work_of_one_stream_runs_in_order_and_other_streams_do_not_wait():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.launch_step()
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    assert ("compute", "side") == backend.enabled()


def test_a_wait_holds_its_stream_until_the_event_is_done():
    backend = SimBackend([exclusive(2, hot=1)])
    event = backend.record("side")
    backend.wait("compute", event, "w2")
    backend.launch_step()
    assert (("side",), False) == (backend.enabled(), backend.query(event))
    backend.advance("side")
    assert (("compute",), True) == (backend.enabled(), backend.query(event))


def test_streams_that_wait_for_each_other_are_a_deadlock():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.wait("side", 0, "w1")
    assert 0 == backend.record("side")
    with pytest.raises(BankError, match="deadlock"):
        backend.drain()


def test_an_entry_that_names_torn_bytes_is_a_violation():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    backend.publish(0, expert=1, row=1)
    backend.advance("side")
    with pytest.raises(SimViolation, match=r"layer_id 0, expert 1: got row 1 with bytes of experts \(1, -1\)"):
        backend.advance("compute")


def test_a_row_that_two_experts_name_is_a_violation():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.publish(0, expert=1, row=0)
    with pytest.raises(SimViolation, match="expert 1: got row 0, which expert 0 has too"):
        backend.drain()


def test_an_entry_that_names_no_row_is_a_violation():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.publish(0, expert=1, row=3)
    with pytest.raises(SimViolation, match="expert 1: got row 3; wanted one of 3 rows"):
        backend.drain()


def test_an_expert_whose_bytes_are_nowhere_is_called_lost():
    backend = SimBackend([exclusive(2, hot=1)])
    backend._memory = (((0, 0), (NOBODY, NOBODY), (0, 1)),)
    with pytest.raises(SimViolation, match="lost everywhere"):
        backend.check()


def test_an_entry_that_changes_while_a_step_runs_is_a_violation():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    backend.drain()
    backend.launch_step()
    backend.advance("compute")
    backend._row_maps = ((0, 1),)
    with pytest.raises(SimViolation, match="changed while a step ran"):
        backend.check()


def test_a_copy_into_a_row_in_use_is_a_violation_whatever_its_bytes():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.copy("side", layer_id=0, source_row=0, target_row=0)
    with pytest.raises(SimViolation, match="its row 0 written to"):
        backend.drain()


def test_a_copy_into_a_memory_that_keeps_all_experts_is_a_violation():
    backend = SimBackend([inclusive(2, hot=1)])
    home_row_of_hot_expert = 2
    backend.copy("side", layer_id=0, source_row=0, target_row=home_row_of_hot_expert)
    with pytest.raises(SimViolation, match="slow memory left as it is"):
        backend.drain()


def test_the_chosen_copy_fails_halfway_and_its_event_says_so():
    backend = SimBackend([exclusive(2, hot=1)], failing_copies=[1])
    events = []
    for _ in range(2):
        backend.copy("side", layer_id=0, source_row=2, target_row=1)
        events.append(backend.record("side"))
    backend.drain()
    assert backend.query(events[0])
    with pytest.raises(SwapError, match="simulated failure"):
        backend.query(events[1])


def test_a_failure_ends_with_its_own_event():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    failed, later = backend.record("side"), backend.record("side")
    backend.advance("side", fail=True)
    backend.drain()
    assert (("failed", "done"), True) == (tuple(map(backend.event_key, (failed, later))), backend.query(later))


def test_only_a_copy_can_fail():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.launch_step()
    with pytest.raises(BankError, match="nothing to run or to fail"):
        backend.advance("compute", fail=True)


def test_a_fork_goes_its_own_way():
    backend = SimBackend([exclusive(2, hot=1)])
    backend.copy("side", layer_id=0, source_row=2, target_row=1)
    fork = backend.fork()
    assert fork.key() == backend.key()
    fork.drain()
    assert ((NOBODY, NOBODY), (1, 1)) == (backend.owners(0, row=1), fork.owners(0, row=1))


def test_states_with_equal_futures_have_equal_keys_whatever_their_events_were_called():
    young, old = SimBackend([exclusive(2, hot=1)]), SimBackend([exclusive(2, hot=1)])
    old.record("side")
    old.drain()
    for backend in (young, old):
        backend.wait("compute", backend.record("side"), "w2")
    assert young.key() == old.key()
