"""Banks that compute on a GPU, over a fake driver: what they hold, what they compute, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hotsplit.bank import device_fill
from hotsplit.bank.banks import BankOptions
from hotsplit.bank.cuda_open import GpuParts, open_cuda
from hotsplit.bank.cuda_probe import Probe
from hotsplit.bank.device_banks import DeviceBanks, DeviceParts
from hotsplit.bank.device_fill import stored_views
from hotsplit.bank.fake_driver import NOTHING, FakeDriver, FakeMachine
from hotsplit.bank.kernels import reference
from hotsplit.bank.row_format import FormedExperts, RowFormat, workspace_bytes
from hotsplit.bank.sim_streams import SimStreams
from hotsplit.bank.source import RowLayout, RowTensor, Span, align
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.errors import BankError, EngineError
from hotsplit.plan.rebalance import RebalanceOptions

E, D, I, TOP_K = 6, 32, 16, 2  # noqa: E741 - as the shapes are called everywhere
SHAPES = {"up": (2 * I, D), "down": (D, I), "up_bias": (2 * I,), "down_bias": (D,)}
DTYPE = torch.bfloat16
HOT = ((4, 1, 0), (2, 5, 3))


@dataclass(frozen=True)
class Source:
    """Rows of random values, one behind the other in one file."""

    files: tuple
    layouts: tuple
    num_experts: int = E

    def spans(self, layer_id, expert):
        start = (layer_id * E + expert) * self.layouts[0].num_bytes
        return [
            Span(file=0, offset=start + part.offset, num_bytes=part.num_bytes, row_offset=part.offset)
            for part in self.layouts[0].tensors
        ]


@pytest.fixture
def source(tmp_path):
    tensors, offset = [], 0
    for name, shape in SHAPES.items():
        tensors.append(RowTensor(name=name, offset=offset, dtype=DTYPE, shape=shape))
        offset = align(offset + tensors[-1].num_bytes)
    layout = RowLayout(tensors=tuple(tensors))
    generator = np.random.default_rng(0)
    values = torch.from_numpy(generator.standard_normal(2 * E * layout.num_bytes // 2)).to(DTYPE)
    path = tmp_path / "rows.bin"
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    return Source(files=(path,), layouts=(layout,) * 2)


FORM = RowFormat(
    tensors={name: (shape, DTYPE) for name, shape in SHAPES.items()}, options={"activation": "silu"}, convert=dict
)


class Machine:
    """One device of no substance."""

    def __init__(self, *, num_banks=1):
        unsupported = frozenset({"host_numa", "host"} if num_banks == 2 else ())
        pages = dict.fromkeys(("device", "host_numa", "host"), 4096)
        self.driver = FakeDriver(FakeMachine(granularity=pages, unsupported=unsupported))
        self.streams = SimStreams(self.driver, num_chunks=2)
        parts = GpuParts(
            device=torch.device("cpu"),
            driver=self.driver,
            streams=self.streams,
            calls=self.streams,
            kernels=SimpleNamespace(route_and_count=reference.route_and_count, begin_step=self.begin_step),
            probe=Probe(read_rate=lambda tensor: 50e9, trial_bytes=1 << 20, tensor_at=cpu_tensor),
            synchronise=self.streams.drain,
        )
        self.parts = DeviceParts(kit=open_cuda(numa_policy="off", parts=parts), experts=reference.experts)

    def begin_step(self, step, *, number, phase):
        for _ in range(5):  # of what the side stream copies, some is done between two steps
            if "side" in self.streams.enabled():
                self.streams.advance("side")
        self.streams.synchronize("compute")
        reference.begin_step(step, number=number, phase=phase)


@pytest.fixture
def build(source):
    made = []

    def make(*, num_banks=1, hot=HOT, dynamic=False, forms=(FORM, FORM), source=source, **changes):
        machine = Machine(num_banks=num_banks)
        options = BankOptions(
            top_k=TOP_K, dynamic=dynamic, dyn_steps=2, rebalance=RebalanceOptions(half_life=1.0, margin=1.0)
        )
        made.append((machine, None))
        banks = DeviceBanks(
            FormedExperts(source=source, forms=forms),
            hot=hot,
            prior=None,
            options=options,
            parts=dataclasses.replace(machine.parts, **changes),
        )
        made[-1] = (machine, banks)
        return banks

    yield make
    for machine, banks in made:
        if banks is not None:
            banks.close()
        assert NOTHING == machine.driver.held


def expert_of(source, layer_id, expert):
    """What the file holds of an expert."""
    size = source.layouts[0].num_bytes
    start = (layer_id * E + expert) * size
    content = bytearray(source.files[0].read_bytes()[start : start + size])
    return stored_views(torch.frombuffer(content, dtype=torch.uint8), layout=source.layouts[0])


def tokens(number, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(number, E, generator=generator).argsort(dim=1)[:, :TOP_K]
    return torch.randn(number, D, generator=generator).to(DTYPE), ids, torch.rand(number, TOP_K, generator=generator)


def run(banks, drawn, *, layer_id=0, phase="decode"):
    """One step of one layer."""
    hidden, ids, weights = drawn
    banks.tick()
    with banks.step(phase=phase, is_padding=None):
        return banks.forward(layer_id, hidden, topk_ids=ids, topk_weights=weights)


def wanted(source, drawn, *, layer_id=0):
    """Outputs of experts that lie in the order of their ids."""
    hidden, ids, weights = drawn
    experts = [expert_of(source, layer_id, expert) for expert in range(E)]
    rows = FORM.rows({name: torch.stack([one[name] for one in experts]) for name in SHAPES}, first_cold=0)
    return reference.experts(hidden, row_ids=ids, topk_weights=weights, rows=rows)


@pytest.mark.parametrize("num_banks", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_row_holds_what_the_file_has_of_its_expert(build, source, num_banks, dynamic):
    banks = build(num_banks=num_banks, dynamic=dynamic)
    for layer_id in range(2):
        for expert in range(E):
            held, stored = banks.expert(layer_id, expert), expert_of(source, layer_id, expert)
            assert all(torch.equal(stored[name], held[name]) for name in SHAPES)


@pytest.mark.parametrize("layer_id", [0, 1])
def test_outputs_are_those_of_the_same_experts_elsewhere(build, source, layer_id):
    for number in (1, 5):
        drawn = tokens(number)
        assert torch.equal(wanted(source, drawn, layer_id=layer_id), run(build(), drawn, layer_id=layer_id))


@pytest.mark.parametrize("hot", [((), ()), HOT, (range(E), range(E))], ids=["cold", "half", "hot"])
def test_two_banks_are_two_calls_and_their_sum(build, source, hot):
    calls = []

    def counted(*args, **kwargs):
        calls.append(len(kwargs["rows"].down))
        return reference.experts(*args, **kwargs)

    drawn = tokens(5)
    found = run(build(num_banks=2, hot=hot, experts=counted), drawn)
    assert [len(part) for part in (hot[0], range(E - len(hot[0]))) if len(part)] == calls
    torch.testing.assert_close(found, wanted(source, drawn), rtol=2**-6, atol=2**-4)


def test_outputs_are_equal_to_the_bit_while_experts_change_place(build, source):
    banks = build(dynamic=True)
    generator = np.random.default_rng(3)
    for number in range(60):
        hidden, _, weights = tokens(1, seed=number)
        low = 3 if number // 15 % 2 else 0
        ids = torch.from_numpy(generator.choice(3, size=(1, TOP_K), replace=False) + low)
        assert torch.equal(wanted(source, (hidden, ids, weights)), run(banks, (hidden, ids, weights)))
    assert banks.live.swaps.done > 6
    assert 0 == banks.live.swaps.failed


def test_small_tensors_stay_fast_for_all_experts_and_are_counted(build):
    assert ("up", "down") == FORM.divided
    banks = build()
    assert 2 * E * FORM.fixed_bytes == banks.hot_bytes - sum(one.fast_bytes for one in banks.rows.ranges)
    assert 2 * 3 * FORM.divided_bytes <= banks.host_bytes < 2 * 3 * FORM.divided_bytes + 4 * 4096


@pytest.mark.parametrize("number", [7, 8, 9, 30])
def test_a_long_prompt_is_cut_without_changing_a_pair(build, source, monkeypatch, number):
    calls = []

    def counted(hidden_states, **kwargs):
        calls.append(len(hidden_states))
        return reference.experts(hidden_states, **kwargs)

    per_token = workspace_bytes(FORM, top_k=TOP_K, itemsize=2)
    monkeypatch.setattr("hotsplit.bank.device_banks.WORKSPACE_BYTES", 8 * per_token)
    drawn = tokens(number)
    torch.testing.assert_close(run(build(experts=counted), drawn), wanted(source, drawn), rtol=2**-6, atol=2**-6)
    assert number == sum(calls)
    assert 8 >= max(calls)


def test_ids_of_any_integer_type_are_taken(build, source):
    hidden, ids, weights = tokens(3)
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert torch.equal(wanted(source, (hidden, ids, weights)), run(build(), (hidden, ids.to(dtype), weights)))


def test_observers_see_what_a_step_routed_and_nothing_is_kept_without_them(build):
    banks, seen = build(), []
    drawn = tokens(3)
    run(banks, drawn)
    assert [] == banks._seen
    banks.observers.append(seen.append)
    mask = torch.tensor([True, False, False])
    with banks.step(phase="prefill", is_padding=mask):
        for layer_id in (0, 1):
            banks.forward(layer_id, drawn[0], topk_ids=drawn[1], topk_weights=drawn[2])
    (one,) = seen
    assert (2, "prefill", (0, 1)) == (one.step, one.phase, one.layer_ids)
    assert torch.equal(drawn[1], one.topk_ids[1])
    assert torch.equal(mask, one.is_padding)


def test_padding_keeps_its_experts_and_is_not_counted(build, source):
    banks, (hidden, ids, weights) = build(), tokens(4)
    mask = torch.tensor([True, False, True, False])
    with banks.step(phase="decode", is_padding=mask):
        found = banks.forward(0, hidden, topk_ids=ids, topk_weights=weights)
    assert torch.equal(wanted(source, (hidden, ids, weights)), found)
    banks.router.settle()
    assert 2 * TOP_K == banks.router.counters.counts["decode"].sum()


def test_a_mask_of_other_tokens_is_left_out_and_said_once(build, caplog):
    banks, (hidden, ids, weights) = build(), tokens(4)
    for _ in range(2):
        with banks.step(phase="decode", is_padding=torch.tensor([True, False])):
            banks.forward(0, hidden, topk_ids=ids, topk_weights=weights)
    banks.router.settle()
    assert 2 * 4 * TOP_K == banks.router.counters.counts["decode"].sum()
    assert 1 == sum("the padding mask has 2 tokens and a layer routes 4" in one.getMessage() for one in caplog.records)


def test_what_runs_outside_of_a_step_is_computed_and_not_counted(build, source):
    banks, drawn = build(), tokens(2)
    found = banks.forward(0, drawn[0], topk_ids=drawn[1], topk_weights=drawn[2])
    assert torch.equal(wanted(source, drawn), found)
    banks.router.settle()
    assert 0 == banks.router.counters.counts["decode"].sum()


def test_a_step_that_breaks_off_ends_the_counting(build):
    banks, drawn = build(), tokens(2)
    with pytest.raises(KeyError), banks.step(phase="decode", is_padding=None):
        raise KeyError
    banks.forward(0, drawn[0], topk_ids=drawn[1], topk_weights=drawn[2])
    banks.router.settle()
    assert 0 == banks.router.counters.counts["decode"].sum()


def test_closed_forked_and_copied_banks_are_refused(build, monkeypatch):
    banks, drawn = build(), tokens(1)
    with pytest.raises(EngineError, match="cannot be copied"):
        copy.copy(banks)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(BankError, match="a process that was forked"):
            banks.tick()
    banks.close()
    with pytest.raises(BankError, match="the banks are closed"):
        run(banks, drawn)


def test_a_conversion_to_something_else_is_refused(build):
    form = dataclasses.replace(FORM, convert=lambda stored: {**stored, "up": stored["up"].float()})
    with pytest.raises(BankError, match="an expert for the kernels of rows: got"):
        build(forms=(form, form))


def test_a_file_that_holds_too_little_is_refused(build, source):
    class Short(Source):
        def spans(self, layer_id, expert):
            spans = super().spans(layer_id, expert)
            return spans[:-1] if (layer_id, expert) == (1, 2) else spans

    with pytest.raises(BankError, match=r"layer_id 1, expert 2: got \d+ bytes in the checkpoint"):
        build(source=Short(files=source.files, layouts=source.layouts))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_banks", [1, 2])
def test_a_row_that_reads_otherwise_than_its_file_is_refused(build, monkeypatch, name, num_banks):

    real, number = device_fill._write, []

    def spoil(rows, *, layer_id, row, values):
        number.append(row)
        real(rows, layer_id=layer_id, row=row, values=values)
        if len(number) == 4:
            which = list(SHAPES).index(name)
            spoilt = values[which].clone().view(-1)
            spoilt[-1] += 1
            where = rows.tensors(layer_id)[which]
            rows.memory.copy([(where.address_of(row), spoilt.data_ptr())], num_bytes=where.row_bytes)

    monkeypatch.setattr(device_fill, "_write", spoil)
    with pytest.raises(BankError, match="layer_id 0, expert 3, as the device reads its row"):
        build(num_banks=num_banks)


def banks_of(source, machine, *, dynamic=False, on_progress=None, **kit):
    """Banks that no fixture closes, over a kit with other parts."""
    return DeviceBanks(
        FormedExperts(source=source, forms=(FORM, FORM)),
        hot=HOT,
        prior=None,
        options=BankOptions(top_k=TOP_K, dynamic=dynamic),
        parts=dataclasses.replace(machine.parts, kit=dataclasses.replace(machine.parts.kit, **kit)),
        on_progress=on_progress,
    )


def test_progress_ends_at_all_bytes(source):
    seen = []
    banks = banks_of(source, Machine(), on_progress=lambda done, total: seen.append((done, total)))
    banks.close()
    assert 2 * E == len(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * E * source.layouts[0].num_bytes


def fails():
    raise RuntimeError("CUDA error: an illegal memory access")


def test_rows_of_a_device_that_failed_are_left_to_the_process(source, caplog):
    machine = Machine()
    banks = banks_of(source, machine, synchronise=fails)
    held = machine.driver.held
    banks.close()
    assert held == machine.driver.held != NOTHING
    assert ["memory of the rows goes with the process: CUDA error: an illegal memory access"] == caplog.messages


def test_a_device_that_fails_while_rows_are_filled_hides_no_error(source, monkeypatch):
    machine = Machine()
    monkeypatch.setattr(device_fill, "_write", lambda *args, **kwargs: {}["the copy"])
    with pytest.raises(KeyError, match="the copy"):
        banks_of(source, machine, synchronise=fails)
    assert NOTHING != machine.driver.held


def test_a_forked_child_closes_nothing_of_its_parents(source, monkeypatch):
    machine = Machine()
    banks = banks_of(source, machine, dynamic=True)
    held, num_calls = machine.driver.held, len(machine.driver.calls)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    banks.close()
    assert (held, num_calls) == (machine.driver.held, len(machine.driver.calls))


def test_rows_and_their_map_are_made_where_they_belong_whatever_the_default_device(build, source):
    with torch.device("meta"):
        banks = build(dynamic=True)
        held = banks.expert(1, 2)
        assert 3 == banks.router.hot_mask()[1].sum()
    assert all(torch.equal(value, held[name]) for name, value in expert_of(source, 1, 2).items())
