"""Which steps are decode and which are prefill, and that a step without tokens is none."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hotsplit.engines.vllm.scheduled import phase_of
from hotsplit.engines.vllm.session import Session


def scheduled(tokens, drafted=None):
    """vLLM's scheduler output: tokens that each request computes, and those drafted for it."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={name: [0] * number for name, number in (drafted or {}).items()},
        total_num_scheduled_tokens=sum(tokens.values()),
    )


@pytest.mark.parametrize(
    ("tokens", "drafted", "phase"),
    [
        ({"a": 1, "b": 1}, {}, "decode"),
        ({"a": 7}, {}, "prefill"),
        ({"a": 1, "b": 2}, {}, "prefill"),
        ({"a": 4, "b": 1}, {"a": 3}, "decode"),
        ({"a": 5, "b": 1}, {"a": 3}, "prefill"),
        ({"a": 4, "b": 4}, {"a": 3}, "prefill"),
        ({"a": 2}, {"a": 3}, "decode"),
        ({"a": 1}, {"a": 0}, "decode"),
    ],
)
def test_a_request_that_computes_more_than_one_token_and_those_drafted_makes_the_step_prefill(tokens, drafted, phase):
    assert phase == phase_of(scheduled(tokens, drafted))


class Banks:
    """Remembers what it is driven to."""

    def __init__(self):
        self.seen = []

    def tick(self):
        self.seen.append("tick")

    @contextmanager
    def step(self, phase):
        self.seen.append(phase)
        yield
        self.seen.append("end")


@pytest.fixture
def session():
    session = Session(SimpleNamespace(is_stock=False))
    session._banks = Banks()
    return session


def test_a_step_ticks_first_and_is_counted_in_its_phase(session):
    with session.step(scheduled({"a": 3})):
        session.banks.seen.append("run")
    assert ["tick", "prefill", "run", "end"] == session.banks.seen


def test_a_step_that_schedules_no_token_is_no_step(session):
    with session.step(scheduled({})):
        pass
    assert [] == session.banks.seen


def test_a_model_that_runs_as_stock_has_no_steps():
    session = Session(SimpleNamespace(is_stock=True))
    with session.step(scheduled({"a": 1})):
        pass
    assert session.is_stock
