"""Steps: one thread at a time, whole steps counted, ended sequences and drafted tokens known for what they are."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines import tiny
from engines.copies import until_swapped
from hotsplit.errors import BankError, EngineError

pytestmark = pytest.mark.transformers

TOP_K = 3


def prompt(rows=1, length=6, *, seed=0):
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **settings):
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | settings
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def counted(model):
    snapshot = model.hotsplit.snapshot()
    return dict(snapshot.tokens), dict(snapshot.pairs)


def test_two_threads_in_one_dynamic_model_both_equal_stock(checkpoint, load):
    folder = checkpoint("qwen3_moe")
    model, stock = load(folder, dyn_steps=1, dyn_margin=1, dyn_half_life=0.5), tiny.stock(folder)
    prompts = [prompt(2, 9, seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [stock(ids).logits for ids in prompts]
    start = threading.Barrier(len(prompts))

    def run(ids):
        start.wait()
        with torch.no_grad():
            return [model(ids).logits for _ in range(10)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(run, prompts))
    assert all(torch.equal(logits, want) for want, runs in zip(expected, got, strict=True) for logits in runs)
    assert 4 * 10 * 18 == sum(counted(model)[0].values())
    until_swapped(model, lambda: tiny.play(model))


def test_a_step_that_breaks_off_is_not_counted_and_the_model_goes_on(checkpoint, load, expected):
    folder = checkpoint("qwen3_moe")
    model = load(folder, dynamic=False)
    banks, real = model.hotsplit.banks, model.hotsplit.banks.forward

    def interrupt(layer_id, *args, **kwargs):
        if layer_id == 1:
            raise KeyboardInterrupt
        return real(layer_id, *args, **kwargs)

    banks.forward = interrupt
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(prompt())
    del banks.forward
    with torch.no_grad():
        model(prompt())
    assert ({"decode": 0, "prefill": 6}, {"decode": 0, "prefill": 6 * TOP_K * 2}) == counted(model)
    assert all(torch.equal(*pair) for pair in zip(expected(folder), tiny.play(model), strict=True))


def first_tokens(model, ids, number):
    return generate(model, ids, max_new_tokens=number, eos_token_id=None)[:, ids.shape[1] :]


def test_an_end_token_given_to_generate_is_the_one_that_ends_a_sequence(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False)
    ids = prompt(2)
    tokens = first_tokens(model, ids, 6)
    end = int(next(token for token in tokens[0] if token not in tokens[1]))
    place = tokens[0].tolist().index(end)
    before = counted(model)[0]["decode"]
    generate(model, ids, eos_token_id=end)
    # Row 1 decodes 5 tokens after its first; row 0 those up to its end, which nobody asks to go on from.
    assert 5 + place == counted(model)[0]["decode"] - before


def test_tokens_that_look_like_an_end_count_outside_of_generate(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False)
    end = model.generation_config.eos_token_id
    with torch.no_grad():
        past = model(prompt(2), use_cache=True).past_key_values
        model(torch.tensor([[end], [end]]), past_key_values=past)
    assert 2 == counted(model)[0]["decode"]


def test_a_batch_of_ended_sequences_does_not_end_the_next_one(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False)
    ids = prompt(2, 1)
    tokens = first_tokens(model, ids, 6)
    end = int(next(token for token in tokens[0] if token not in tokens[1]))
    generate(model, ids, eos_token_id=end)
    before = counted(model)[0]["decode"]
    generate(model, ids, eos_token_id=None)
    assert 2 * 6 == counted(model)[0]["decode"] - before  # a prompt of one token is a step of one token


def test_drafted_tokens_are_decode(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dynamic=False)
    ids = prompt(1, 4).repeat(1, 3)
    plain = generate(model, ids)
    before = counted(model)[0]
    assert torch.equal(plain, generate(model, ids, prompt_lookup_num_tokens=3))
    after = counted(model)[0]
    assert 12 <= after["prefill"] - before["prefill"] <= 15  # the first step has the prompt and the first draft
    assert 2 <= after["decode"] - before["decode"]


def test_no_part_of_the_model_can_be_saved_without_its_experts(checkpoint, load, tmp_path):
    model = load(checkpoint("qwen3_moe"))
    for part in (model, model.base_model):
        with pytest.raises(EngineError, match="save_pretrained.*copy the model folder"):
            part.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_state_dict_says_what_it_lacks(checkpoint, load, caplog):
    model = load(checkpoint("qwen3_moe"))
    assert [] == [name for name in model.state_dict() if ".experts." in name]
    assert any("no routed experts" in record.message for record in caplog.records)


@pytest.mark.parametrize("break_it", [lambda m: m.half(), lambda m: m.double()])
def test_a_model_that_was_cast_refuses_in_one_line(checkpoint, load, break_it):
    model = break_it(load(checkpoint("qwen3_moe")))
    with pytest.raises(EngineError, match="experts of torch.bfloat16: got tokens of.*model_kwargs"), torch.no_grad():
        model(prompt())


def test_a_model_cannot_be_copied_or_switched(checkpoint, load):
    model = load(checkpoint("qwen3_moe"))
    with pytest.raises(EngineError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(EngineError, match="set_experts_implementation"):
        model.set_experts_implementation("eager")


def test_closed_banks_refuse_a_step_also_with_swaps_due(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dyn_steps=1, dyn_margin=1)
    with torch.no_grad():
        model(prompt())
    model.hotsplit.close()
    with pytest.raises(BankError, match="closed"), torch.no_grad():
        model(prompt())


def test_a_model_file_that_changes_while_in_use_is_an_error(tmp_path, load, monkeypatch):
    folder = tiny.make_checkpoint(tmp_path / "model", model_type="qwen3_moe")
    model = load(folder, dynamic=False)
    monkeypatch.setattr("hotsplit.bank.pointers._CHECK_EVERY_S", 0.0)
    with torch.no_grad():
        model(prompt())
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        with pytest.raises(BankError, match="model.safetensors has changed while it was in use"):
            model(prompt())
