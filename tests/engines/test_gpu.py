"""One GPU, over a stand-in: the whole engine, from the checkpoint to text, but for the device itself.

The promise there: outputs equal to the bit wherever experts lie and while they move; as near to the exact result as
stock's own. In float32 that is near enough for every token.
"""

from __future__ import annotations

import pytest
import torch

from engines import tiny
from engines.stand_in import TWO_BANKS, budget
from hotsplit.bank import device_banks
from hotsplit.bank.kernels import reference
from hotsplit.bank.row_format import RowFormat
from hotsplit.errors import BankError, UnsupportedEngineError

pytestmark = pytest.mark.transformers

E = 8
ARCHITECTURES = sorted(tiny.CONFIGS)
SWAPPING = {"dyn_steps": 2, "dyn_margin": 1, "dyn_half_life": 1}


def bits(outputs):
    return [
        output.view(torch.int16 if output.dtype == torch.bfloat16 else torch.int32).tolist() for output in outputs[:2]
    ]


def distance(output, truth):
    return float((output.double() - truth.double()).norm())


# Near to the exact result, and the same tokens.


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "qwen3_vl_moe"])
def test_tokens_equal_stocks_in_float32_and_logits_are_as_exact(checkpoint, expected, load_on_gpu, model_type):
    folder = checkpoint(model_type, dtype=torch.float32)
    stock = expected(folder)
    exact = expected(folder, dtype=torch.float64)
    mine = tiny.play(load_on_gpu(folder, dynamic=True, **SWAPPING))
    assert stock[2].tolist() == mine[2].tolist()
    for theirs, ours, truth in zip(stock[:2], mine[:2], exact[:2], strict=True):
        assert distance(ours, truth) <= 2 * distance(theirs, truth)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "nemotron_h", "deepseek_v3"])
def test_logits_in_bfloat16_are_as_exact_as_stocks(checkpoint, expected, load_on_gpu, model_type):
    folder = checkpoint(model_type)
    exact = expected(folder, dtype=torch.float64)
    mine = tiny.play(load_on_gpu(folder))
    for theirs, ours, truth in zip(expected(folder)[:2], mine[:2], exact[:2], strict=True):
        assert distance(ours, truth) <= 1.25 * distance(theirs, truth)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_float8_rows_stay_float8_and_give_stocks_tokens(checkpoint, expected, load_on_gpu, model_type):
    folder = checkpoint(model_type, fp8=True)
    model = load_on_gpu(folder)
    assert {torch.float8_e4m3fn, torch.float32} == {
        dtype for form in model.hotsplit.banks._forms for _, dtype in form.tensors.values()
    }
    assert expected(folder)[2].tolist() == tiny.play(model)[2].tolist()


# Equal wherever experts lie.


PLACED = ["qwen3_moe", "gpt_oss", "deepseek_v4", "nemotron_h", "granitemoe"]


@pytest.mark.parametrize(("model_type", "fp8"), [*((name, False) for name in PLACED), ("qwen3_moe", True)], ids=str)
def test_outputs_are_equal_to_the_bit_wherever_experts_lie(checkpoint, load_on_gpu, model_type, fp8):
    folder = checkpoint(model_type, fp8=fp8)
    found = [tiny.play(load_on_gpu(folder, rows=rows)) for rows in (0, 3, 6, 8)]
    assert [bits(found[0])] * 4 == [bits(one) for one in found]
    assert [found[0][2].tolist()] * 4 == [one[2].tolist() for one in found]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_outputs_are_equal_to_the_bit_while_experts_change_place(checkpoint, load_on_gpu, model_type):
    folder = checkpoint(model_type)
    resting = tiny.play(load_on_gpu(folder, rows=8))
    model = load_on_gpu(folder, rows=3, dynamic=True, **SWAPPING)
    before = model.hotsplit.banks.router.row_map.tolist()
    for _ in range(3):
        moving = tiny.play(model)
        assert bits(resting) == bits(moving)
        assert resting[2].tolist() == moving[2].tolist()
    assert model.hotsplit.snapshot().swaps_done > 0
    assert before != model.hotsplit.banks.router.row_map.tolist()


def test_a_long_prompt_is_computed_in_pieces_of_equal_bits(checkpoint, load_on_gpu, monkeypatch):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    ids = torch.randint(3, 100, (2, 100), generator=torch.Generator().manual_seed(0))
    num_calls = []
    real = model.hotsplit.banks._experts
    monkeypatch.setattr(model.hotsplit.banks, "_experts", lambda *a, **k: (num_calls.append(1), real(*a, **k))[1])
    with torch.no_grad():
        whole = model(ids).logits
        assert 2 == len(num_calls)
        monkeypatch.setattr(device_banks, "WORKSPACE_BYTES", 60 * 3 * (4 * 64 + 2 * 32))
        pieces = model(ids).logits
    assert 2 + 2 * 4 == len(num_calls)
    torch.testing.assert_close(whole, pieces, rtol=0, atol=0.05)


# Two banks.


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("rows", [0, 4, 8])
def test_two_banks_give_stocks_tokens_too_and_say_what_they_do_not_promise(
    checkpoint, expected, load_on_gpu, stand_in, model_type, rows
):
    folder = checkpoint(model_type, dtype=torch.float32)
    machine = stand_in(unsupported=TWO_BANKS)
    model = load_on_gpu(folder, rows=rows, machine=machine, dynamic=rows > 0, **(SWAPPING if rows else {}))
    for _ in range(3):
        assert expected(folder)[2].tolist() == tiny.play(model)[2].tolist()
    assert "cuda-two-banks" == model.hotsplit.snapshot().backend
    assert 1 == [notice.name for notice in model.hotsplit.notices].count("two-banks")
    assert (0 < rows < E) == (model.hotsplit.snapshot().swaps_done > 0)


def test_one_bank_says_nothing_of_two(checkpoint, load_on_gpu):
    model = load_on_gpu(checkpoint("qwen3_moe"))
    assert "cuda-stitched" == model.hotsplit.snapshot().backend
    assert "two-banks" not in [notice.name for notice in model.hotsplit.notices]


# The comparisons above must find what is wrong: each test below breaks one thing.


@pytest.mark.parametrize("rows", [0, 4, 8])
def test_a_row_map_that_is_rolled_by_one_is_noticed(checkpoint, load_on_gpu, rows):
    folder = checkpoint("qwen3_moe")
    resting = bits(tiny.play(load_on_gpu(folder, rows=8)))
    model = load_on_gpu(folder, rows=rows)
    maps = model.hotsplit.banks.router.device_maps[torch.int64]
    maps[0] = maps[0].roll(1)
    assert resting != bits(tiny.play(model))


def test_one_wrong_byte_in_a_row_is_noticed(checkpoint, load_on_gpu):
    folder = checkpoint("qwen3_moe")
    resting = bits(tiny.play(load_on_gpu(folder)))
    model = load_on_gpu(folder)
    for parts in model.hotsplit.banks._tensors[0]["down"]:
        parts.view(torch.uint8)[:, 3, 5] ^= 64
    assert resting != bits(tiny.play(model))


def test_a_swap_that_copies_nothing_is_noticed(checkpoint, load_on_gpu, stand_in, monkeypatch):
    folder = checkpoint("qwen3_moe")
    resting = bits(tiny.play(load_on_gpu(folder, rows=8)))
    machine = stand_in()
    model = load_on_gpu(folder, rows=3, machine=machine, dynamic=True, **SWAPPING)
    monkeypatch.setattr(machine.driver, "copy", lambda *args, **kwargs: None)
    found = [bits(tiny.play(model)) for _ in range(3)]
    assert model.hotsplit.snapshot().swaps_done > 0
    assert [resting] * 3 != found


def test_a_copy_that_does_not_arrive_ends_the_load(checkpoint, load_on_gpu, stand_in, monkeypatch):
    machine, num_copies = stand_in(), []
    real = machine.driver.copy

    def copy_all_but_one(target, **kwargs):
        num_copies.append(target)
        if len(num_copies) != 13:
            real(target, **kwargs)

    folder = checkpoint("qwen3_moe")
    hot_gib = budget(folder, rows=4, dynamic=False)
    monkeypatch.setattr(machine.driver, "copy", copy_all_but_one)
    with pytest.raises(BankError, match=r"layer_id 0, expert \d, as the device reads its row: got other bytes"):
        load_on_gpu(folder, machine=machine, hot_gib=hot_gib)


# The proof at load.


@pytest.mark.parametrize(
    "changes",
    [{"activation": "gelu"}, {"gate_limit": 0.5}, {"gate_shift": 1.0}, {"gate_slope": 1.05}],
    ids=lambda changes: next(iter(changes)),
)
def test_kernels_that_compute_something_else_are_refused(checkpoint, load_on_gpu, monkeypatch, changes):
    real = RowFormat.rows

    def other(self, tensors, *, first_cold):
        return reference.ExpertRows(first_cold=first_cold, **tensors, **(self.options | changes))

    monkeypatch.setattr(RowFormat, "rows", other)
    with pytest.raises(UnsupportedEngineError, match="differ from the stock module's by .* use device='cpu'"):
        load_on_gpu(checkpoint("qwen3_moe"), hot_gib=0.001)
    monkeypatch.setattr(RowFormat, "rows", real)


def test_rows_that_are_others_are_refused(checkpoint, load_on_gpu, monkeypatch):
    real = device_banks.DeviceBanks.expert
    monkeypatch.setattr(device_banks.DeviceBanks, "expert", lambda self, layer_id, expert: real(self, layer_id, 3))
    with pytest.raises(UnsupportedEngineError, match="results of one token that differ"):
        load_on_gpu(checkpoint("qwen3_moe"), hot_gib=0.001)
