"""What the CPU twin keeps in memory, on a model of 2.5 GB with a quarter of its experts hot.

Anonymous memory is the measure, since cold pages that a file backs count as resident for as long as there is room. It
is read when all is loaded and before the KV cache is made.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.vllm.vllm_jobs import Job, random_prompts, run
from engines.vllm.vllm_models import config_of, rows_bytes

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]

ALLOWANCE_BYTES = 600_000_000
"""What is promised beside hot rows and dense weights: Python, torch and vLLM are two thirds of it."""
ENGINE = {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("large")


@pytest.fixture(scope="module")
def job(folder):
    return Job(model=folder, prompts=random_prompts(config_of(folder)["vocab_size"]), max_tokens=16, engine=ENGINE)


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory):
    return run(job, place=tmp_path_factory.mktemp("stock-large")).answers(0)


@pytest.fixture(scope="module")
def split(job, settings, tmp_path_factory):
    passes = [[], ["evict"]]
    watched = replace(job, settings=settings("large"), probe={}, passes=passes, last=["report"])
    return run(watched, place=tmp_path_factory.mktemp("split-large"))


@pytest.fixture(scope="module")
def memory(split):
    return split.told("report")[0]["memory"]


@pytest.fixture(scope="module")
def snapshot(split):
    return split.snapshots[0]


def test_it_is_a_quarter_hot(folder, snapshot):
    experts, _ = rows_bytes(folder)
    assert 0.25 * experts < snapshot.hot_bytes < 0.28 * experts
    assert 0.72 * experts < snapshot.host_bytes <= 0.75 * experts


def test_loaded_it_holds_hot_rows_dense_weights_and_at_most_600_mb(folder, memory, snapshot):
    _, dense = rows_bytes(folder)
    assert memory["loaded"] < snapshot.hot_bytes + dense + ALLOWANCE_BYTES


def test_at_its_peak_it_holds_one_layer_more(folder, memory, snapshot):
    experts, dense = rows_bytes(folder)
    layer = experts // config_of(folder)["num_hidden_layers"]
    assert memory["peak"] < snapshot.hot_bytes + dense + ALLOWANCE_BYTES + layer


def test_cold_rows_lie_in_the_bank_file_and_nowhere_else(folder, memory, snapshot):
    """The file is as large as they are, none of its pages is a private copy, and the heap grew by nothing like them."""
    experts, dense = rows_bytes(folder)
    cold = experts * 3 // 4
    assert cold <= memory["loaded_bank_size"] < 1.001 * cold
    assert 0 == memory["loaded_bank_anonymous"]
    assert memory["loaded"] - memory["before"] - snapshot.hot_bytes - dense < 0.1 * cold


def test_cold_pages_that_were_pushed_out_come_back_bit_by_bit(split, expected, snapshot):
    (pages,) = split.told("evict")
    assert pages["before"] > 0.5 * snapshot.host_bytes
    assert pages["after"] < 0.01 * snapshot.host_bytes
    assert expected == split.answers(0)
    assert expected == split.answers(1)
