"""The thread that answers who asks for a snapshot as of now: an answer is never given beside an old file."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from cli.fake_openai import FakeServer
from hotsplit.bank import runs
from hotsplit.engines.vllm.teller import Teller
from hotsplit.errors import HotsplitError
from hotsplit.metrics import read_snapshot, snapshot_path
from patience import until


@pytest.fixture
def teller(tmp_path):
    """A teller of a run in tmp_path whose record goes on where it cannot write, as bank/record.py does."""
    snapshot = FakeServer(None)
    snapshot.close()
    record = SimpleNamespace(
        facts=SimpleNamespace(run_dir=tmp_path, rank=0),
        snapshot=snapshot.snapshot,
        write=lambda _: None,
        save=lambda _: None,
        is_save_due=False,
    )
    router = SimpleNamespace(counters=SimpleNamespace(steps=0), settle=lambda: None)
    banks = SimpleNamespace(lock=threading.Lock(), settle=lambda _: True, router=router)
    one = Teller(record, banks=banks, every_s=0.01)
    yield one
    one.close()


def test_who_asks_is_answered_with_a_snapshot_beside_it(teller, tmp_path):
    runs.ask(tmp_path, word="one")
    until(lambda: "one" == runs.told(tmp_path, rank=0))
    assert 0 == read_snapshot(snapshot_path(tmp_path, rank=0)).steps


def test_who_asks_is_not_answered_where_the_snapshot_cannot_be_written(teller, tmp_path, monkeypatch, caplog):
    def full(snapshot, run_dir):
        raise HotsplitError(f"cannot write {run_dir}", got="No space left on device")

    monkeypatch.setattr("hotsplit.engines.vllm.teller.write_snapshot", full, raising=False)
    runs.ask(tmp_path, word="one")
    until(lambda: "cannot be written" in caplog.text or runs.told(tmp_path, rank=0))
    assert "" == runs.told(tmp_path, rank=0)
    monkeypatch.undo()
    runs.ask(tmp_path, word="two")
    until(lambda: "two" == runs.told(tmp_path, rank=0))
