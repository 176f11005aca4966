"""What the README promises: two lines load a model that generates as the stock one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from engines import tiny
from engines.copies import until_swapped
from hotsplit.data import tiny_moe_path

pytestmark = pytest.mark.transformers

PROMPT = torch.arange(40, 60)[None]


def run(code, tmp_path):
    """A fresh interpreter, as a user has it, with a cache folder of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}  # noqa: TID251 - handed on
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.split("\n")


@pytest.mark.slow
def test_two_lines_give_a_model_that_generates_as_the_stock_one(tmp_path):
    code = f"""
        import hotsplit
        model = hotsplit.load({str(tiny_moe_path())!r}, hot_gib=0.002)
        import torch
        print(model.generate(torch.arange(40, 60)[None], max_new_tokens=20, do_sample=False).tolist())
        print(model.hotsplit.plan.hot_rows().tolist())
    """
    tokens, hot_rows, *_ = run(code, tmp_path)
    expected = tiny.stock(tiny_moe_path()).generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert str(expected.tolist()) == tokens
    assert all(4 <= rows < 32 for rows in json.loads(hot_rows))


@pytest.mark.slow
def test_importing_loads_neither_torch_nor_an_engine_and_loading_does(tmp_path):
    code = """
        import sys
        import hotsplit
        print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
        hotsplit.load
        print("torch" in sys.modules)
    """
    assert ["[]", "True", ""] == run(code, tmp_path)


@pytest.mark.parametrize("hot", [0.0, 0.3, 1.0])
def test_the_bundled_model_equals_stock(load, hot):
    model = load(tiny_moe_path(), hot=hot, dynamic=False)
    expected = tiny.stock(tiny_moe_path())
    assert all(torch.equal(*pair) for pair in zip(tiny.play(expected), tiny.play(model), strict=True))


def test_the_bundled_model_equals_stock_while_its_experts_move(load):
    model = load(tiny_moe_path(), hot=0.3, dyn_steps=2, dyn_margin=1, dyn_half_life=1)
    expected = tiny.play(tiny.stock(tiny_moe_path()), tokens=30)
    assert all(torch.equal(*pair) for pair in zip(expected, tiny.play(model, tokens=30), strict=True))
    until_swapped(model, lambda: tiny.play(model, tokens=30), swaps=6)


def test_sampling_draws_the_same_tokens_as_stock(load):
    model, stock = load(tiny_moe_path(), hot=0.3, dynamic=False), tiny.stock(tiny_moe_path())
    drawn = []
    for one in (stock, model):
        torch.manual_seed(7)
        drawn.append(one.generate(PROMPT, max_new_tokens=20, do_sample=True, temperature=0.9, top_p=0.95))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"cache_implementation": "static"}])
def test_other_ways_to_generate_give_what_stock_gives(load, how):
    model, stock = load(tiny_moe_path(), hot=0.3, dynamic=False), tiny.stock(tiny_moe_path())
    outputs = [one.generate(PROMPT, max_new_tokens=12, do_sample=False, **how) for one in (stock, model)]
    assert torch.equal(*outputs)


def test_two_threads_give_what_one_gives(load):
    model, stock = load(tiny_moe_path(), hot=0.3, dynamic=False), tiny.stock(tiny_moe_path())
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(*pair) for pair in zip(tiny.play(stock), tiny.play(model), strict=True))
    finally:
        torch.set_num_threads(1)
