"""Kept rows are counted to the byte: of what steps touched, all is hot, lay in a slot, or was fetched, and nothing twice."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bank.interrupts import cut_off
from bank.test_banks import expert_function
from bank.toy_source import HIDDEN, toy_source
from hotsplit.bank import cold_reads, kept_rows, route, staging
from hotsplit.bank.banks import BankOptions, Banks
from hotsplit.bank.cold_choice import slot_needs
from hotsplit.bank.device_router import DeviceRouter
from hotsplit.bank.kept_rows import KeptRows
from hotsplit.bank.kernels import reference
from hotsplit.bank.kernels.exact import ExpertMath
from hotsplit.bank.mapped import MappedFiles
from hotsplit.bank.pointers import RowsOptions
from hotsplit.bank.route import PHASES, Router
from hotsplit.bank.rows import place
from hotsplit.bank.staged_row import file_ranges
from hotsplit.bank.staging import Staging
from hotsplit.errors import BankError
from hotsplit.plan.counters import window_between
from hotsplit.plan.rebalance import RebalanceOptions
from patience import LIMIT_S, set_when

E, LAYERS = 6, 2
HOT = ((2, 0), (3, 1))
PARTS = ("hot", "kept", "fetched")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return toy_source(tmp_path_factory.mktemp("toy"), num_experts=E)


def build(source, *, dynamic=False, **rows):
    rebalance = RebalanceOptions(margin=1.0, max_swaps=2, half_life=1.0)
    rows = RowsOptions(slot_bytes=slot_needs(source).slot_bytes, **rows)
    options = BankOptions(top_k=2, dynamic=dynamic, dyn_steps=1, rebalance=rebalance, rows=rows)
    banks = Banks(source, hot=HOT, prior=None, options=options)
    for layer_id in range(LAYERS):
        banks.use_math(layer_id, ExpertMath(function=expert_function, num_experts=E, accumulate=None))
    return banks


class Witness:
    """Counts without the notes: by what the banks fetch, from slots' being taken and from the page cache's being used."""

    def __init__(self, banks, source, *, patch, is_present=lambda: False):
        self._banks, self._row_bytes = banks, source.layouts[0].num_bytes
        self._fetched: set[tuple[int, int]] = set()
        self.bytes = {phase: Counter(dict.fromkeys(PARTS, 0)) for phase in PHASES}
        keys = {tuple(file_ranges(spans)): key for key, spans in source.rows.items()}
        stepping = threading.get_ident()
        take, read_ahead = Staging.take, MappedFiles.read_ahead

        def watched_take(slots, key, *, turn):
            slot = take(slots, key, turn=turn)
            if slot is not None:
                self._fetched.add(key)
            return slot

        def watched_presence(_, spans):
            if threading.get_ident() != stepping:
                return False
            found = is_present()
            if found:
                self._fetched.add(keys[tuple(spans)])
            return found

        def watched_read_ahead(files, spans):
            if threading.get_ident() == stepping:
                self._fetched.add(keys[tuple(spans)])
            read_ahead(files, spans)

        patch.setattr(Staging, "take", watched_take)
        patch.setattr(MappedFiles, "is_present", watched_presence)
        patch.setattr(MappedFiles, "read_ahead", watched_read_ahead)

    def step(self, ids, *, phase="decode", is_padding=None, breaks=None):
        """One step, counted unless it breaks off: layer `breaks` raises in the middle of its experts."""
        self._banks.tick()
        self._fetched.clear()
        hot = self._banks.router.hot_mask()
        try:
            with self._banks.step(phase=phase, is_padding=is_padding):
                for layer_id, layer_ids in enumerate(ids):
                    self._forward(layer_id, torch.tensor(layer_ids), breaks=layer_id == breaks)
        except ZeroDivisionError:
            settle(self._banks)
            return
        kept_T = [True] * len(ids[0]) if is_padding is None else (~is_padding).tolist()
        for layer_id, layer_ids in enumerate(ids):
            real = {expert for token, is_real in zip(layer_ids, kept_T, strict=True) if is_real for expert in token}
            for expert in real & set(range(E)):
                was_fetched = (layer_id, expert) in self._fetched
                part = "hot" if hot[layer_id, expert] else "fetched" if was_fetched else "kept"
                self.bytes[phase][part] += self._row_bytes

    def _forward(self, layer_id, ids, *, breaks):
        hidden, weights = torch.ones(len(ids), HIDDEN).bfloat16(), torch.ones(ids.shape).bfloat16()
        broken = ExpertMath(function=lambda *_: 1 // 0, num_experts=E, accumulate=None)
        whole = self._banks._maths[layer_id]
        if breaks:
            self._banks.use_math(layer_id, broken)
        try:
            self._banks.forward(layer_id, hidden, topk_ids=ids, topk_weights=weights)
        finally:
            self._banks.use_math(layer_id, whole)


def settle(banks):
    """Reads that a broken step has begun come to an end: then a later step finds their rows, for sure."""
    deadline = time.monotonic() + 10
    while banks.rows._cold._reading:
        assert time.monotonic() < deadline
        banks.rows.ask(0, [])


def counted(banks):
    """The same of the counters."""
    banks.router.flush()
    counters = banks.router.counters
    found = {}
    for phase in PHASES:
        hot, cold = counters.touched_hot_bytes[phase], counters.touched_cold_bytes[phase]
        kept = 0 if counters.kept_bytes is None else counters.kept_bytes[phase]
        found[phase] = {"hot": hot, "kept": kept, "fetched": cold - kept}
    return found


tokens = st.integers(1, 4)
experts = st.integers(-1, E)  # both ends are sentinels


@st.composite
def steps(draw):
    num_tokens = draw(tokens)
    layer = st.lists(st.tuples(experts, experts).map(list), min_size=num_tokens, max_size=num_tokens)
    mask = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens).map(torch.tensor)
    return {
        "ids": [draw(layer) for _ in range(LAYERS)],
        "phase": draw(st.sampled_from(PHASES)),
        "is_padding": draw(st.none() | mask),
        "breaks": draw(st.sampled_from([None, None, None, 0, 1])),
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(steps(), min_size=1, max_size=14),
    st.fixed_dictionaries({"slots": st.integers(0, 5), "is_direct": st.booleans(), "dynamic": st.booleans()}),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.3]),
)
def test_hot_kept_and_fetched_bytes_are_all_that_was_touched(source, played, how, dice, share_present):
    with pytest.MonkeyPatch.context() as patch:
        banks = build(source, **how)
        try:
            witness = Witness(banks, source, patch=patch, is_present=lambda: dice.random() < share_present)
            for one in played:
                witness.step(**one)
            found = counted(banks)
            assert {phase: dict(parts) for phase, parts in witness.bytes.items()} == found
            assert (how["slots"] > 0) == (banks.router.counters.kept_bytes is not None)
        finally:
            banks.close()


STEPS = [
    {"ids": [[[1, 3]], [[0, 3]]], "phase": "prefill"},
    {"ids": [[[1, 2]], [[0, 0]]]},
    {"ids": [[[1, 3]], [[2, 0]]], "is_padding": torch.tensor([False])},
    {"ids": [[[1, 3]], [[4, 5]]], "breaks": 1},
    {"ids": [[[1, 1], [4, 5]], [[0, 2], [4, 5]]], "phase": "prefill", "is_padding": torch.tensor([True, False])},
    {"ids": [[[1, 4]], [[5, 2]]]},
]


@pytest.fixture
def rows_of(source):
    return lambda number: number * source.layouts[0].num_bytes


def play(banks, source, patch):
    witness = Witness(banks, source, patch=patch)
    for one in STEPS:
        witness.step(**one)
    return witness


def test_what_is_kept_by_hand(source, rows_of, monkeypatch):
    """Eight slots hold all cold rows: whatever a step has fetched once is kept from then on, whatever lies between."""
    banks = build(source, slots=8, is_direct=True)
    play(banks, source, monkeypatch)
    found = counted(banks)
    # Prefill: 1, 3 and 0 are fetched, 3 of layer 1 is hot; then, beside a token of padding, 4 and 5 of both layers, which
    # the step that broke off has fetched in layer 1.
    assert {"hot": rows_of(1), "kept": rows_of(2), "fetched": rows_of(5)} == found["prefill"]
    # Decode: 1 and 0, with 2 hot; then 1, 3 and 0, with 2 of layer 1 fetched; then 1 and 4, 5 and 2.
    assert {"hot": rows_of(1), "kept": rows_of(2 + 3 + 4), "fetched": rows_of(1)} == found["decode"]
    banks.close()


@pytest.mark.parametrize(
    "lie",
    [
        lambda key, is_kept: True,
        lambda key, is_kept: False,
        lambda key, is_kept: not is_kept,
        lambda key, is_kept: is_kept or key == (0, 1),
    ],
)
def test_the_witness_finds_a_wrong_note(source, monkeypatch, lie):
    note = KeptRows.note
    monkeypatch.setattr(KeptRows, "note", lambda self, key, *, is_kept: note(self, key, is_kept=lie(key, is_kept)))
    banks = build(source, slots=8, is_direct=True)
    witness = play(banks, source, monkeypatch)
    assert {phase: dict(parts) for phase, parts in witness.bytes.items()} != counted(banks)
    banks.close()


def test_notes_that_outlive_their_step_are_found(source, monkeypatch):
    monkeypatch.setattr(KeptRows, "forget", lambda _: None)
    banks = build(source, slots=8, is_direct=True)
    witness = play(banks, source, monkeypatch)
    assert {phase: dict(parts) for phase, parts in witness.bytes.items()} != counted(banks)
    banks.close()


def test_an_interrupt_at_every_seventh_instruction_of_a_step_leaves_counts_that_add_up(source, monkeypatch):
    banks = build(source, slots=3, is_direct=True)
    witness, at, is_inside = Witness(banks, source, patch=monkeypatch), 0, True
    modules = [cold_reads, kept_rows, route, staging]

    def interrupted(ids):
        with banks.step(phase="decode", is_padding=None):
            for layer_id in range(LAYERS):
                witness._forward(layer_id, torch.tensor(ids), breaks=False)

    while is_inside:
        before = counted(banks)
        ids = [[at % E, (at + 1 + at % 2) % E]]
        is_inside = cut_off(lambda ids=ids: interrupted(ids), at=at, modules=modules)
        settle(banks)
        if is_inside:
            assert before == counted(banks)
            witness.step([ids, ids])
            witness.step([[[(at + 3) % E, at % E]]] * LAYERS)
            assert dict(witness.bytes["decode"]) == counted(banks)["decode"], at
        at += 7
    assert at > 400
    banks.close()


def test_a_read_that_fails_leaves_no_count_and_the_next_step_fetches_anew(source, rows_of, monkeypatch):
    banks = build(source, slots=3, is_direct=True)
    witness = Witness(banks, source, patch=monkeypatch)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_):
            raise BankError("cannot read the disk", got="Input/output error")

        patch.setattr(Staging, "read", fail)
        with pytest.raises(BankError, match="cannot read the disk"):
            witness.step([[[1, 3]], [[0, 2]]])
    assert {"hot": 0, "kept": 0, "fetched": 0} == counted(banks)["decode"]
    for _ in range(2):
        witness.step([[[1, 2]], [[0, 3]]])
    assert {"hot": rows_of(4), "kept": rows_of(2), "fetched": rows_of(2)} == counted(banks)["decode"]
    banks.close()


def test_a_row_that_a_broken_step_is_still_reading_is_not_kept(source, rows_of, monkeypatch):
    banks, go, read, notes = build(source, slots=3, is_direct=True), threading.Event(), Staging.read, []
    witness = Witness(banks, source, patch=monkeypatch)
    monkeypatch.setattr(Staging, "read", lambda *arguments: go.wait(LIMIT_S) and read(*arguments))
    with pytest.raises(ZeroDivisionError), banks.step(phase="decode", is_padding=None):
        witness._forward(0, torch.tensor([[2, 1]]), breaks=True)  # expert 2 is hot, and breaks off while 1 is read
    note = KeptRows.note
    monkeypatch.setattr(KeptRows, "note", lambda *given, **named: (note(*given, **named), notes.append(given)))
    set_when(go, lambda: notes)
    witness.step([[[1, 2]], [[3, 1]]])
    assert {"hot": rows_of(3), "kept": 0, "fetched": rows_of(1)} == counted(banks)["decode"]
    banks.close()


def test_a_layer_that_runs_twice_in_a_step_keeps_nothing_for_itself(source, rows_of, monkeypatch):
    banks = build(source, slots=3, is_direct=True)
    witness = Witness(banks, source, patch=monkeypatch)
    for kept in (0, 1):
        before = counted(banks)["decode"]["kept"]
        with banks.step(phase="decode", is_padding=None):
            for _ in range(2):
                witness._forward(0, torch.tensor([[1, 2]]), breaks=False)
        assert before + rows_of(kept) == counted(banks)["decode"]["kept"]
    banks.close()


def test_a_window_has_the_share_of_its_own_phase_and_none_where_nothing_was_touched(source, monkeypatch):
    banks = build(source, slots=8, is_direct=True)
    witness = Witness(banks, source, patch=monkeypatch)
    start = banks.router.counters.copy()
    assert window_between(start, start).kept_ratio is None
    witness.step(**STEPS[0])
    banks.router.flush()
    first = banks.router.counters.copy()
    assert ("prefill", 0.0) == (window_between(start, first).phase, window_between(start, first).kept_ratio)
    witness.step(**STEPS[1])
    witness.step(**STEPS[2])
    banks.router.flush()
    window = window_between(first, banks.router.counters)
    assert (5 / 7, 1 / 7) == (window.kept_ratio, window.byte_hit_ratio)
    banks.close()


def test_routers_of_vllm_and_of_a_gpu_have_no_slots():
    layers = [place((0, 1), num_experts=E, spare=False, inclusive=True)]
    device = DeviceRouter(layers, row_bytes=(7,), device=torch.device("cpu"), kernels=reference)
    for router in (Router(layers, row_bytes=(7,), copies_ids=True), device):
        before = router.counters.copy()
        router.begin_step(1, phase="decode")
        router.serve(0, torch.tensor([[0, 5]]), is_padding=None)
        router.end_step()
        router.settle()
        assert 7 == router.counters.touched_cold_bytes["decode"]
        assert router.counters.kept_bytes is None
        assert window_between(before, router.counters).kept_ratio is None
