"""Loading: classes are put back whatever happens, many loads at once stay apart, and a closed model gives everything back."""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import hotsplit
from engines import tiny
from engines.conftest import budget
from hotsplit.engines.transformers.index import find_experts
from hotsplit.engines.transformers.leave_out import experts_left_out
from hotsplit.errors import BankError, CheckpointError, HotsplitError

pytestmark = pytest.mark.transformers

CLASSES = (transformers.Qwen3MoeForCausalLM,)


def same(expected, got):
    return [torch.equal(*pair) for pair in zip(expected, got, strict=True)]


def patched_state():
    """All that a load changes in a class."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    model_class = transformers.Qwen3MoeForCausalLM
    return (
        modeling.Qwen3MoeExperts.__init__,
        "_keys_to_ignore_on_load_unexpected" in vars(model_class),
        model_class._keys_to_ignore_on_load_unexpected,
    )


@pytest.fixture
def context(checkpoint):
    """experts_left_out for qwen3_moe, as a load enters it."""
    stock = tiny.stock(checkpoint("qwen3_moe"))
    layers = find_experts(stock)
    kind = type(stock.get_submodule(layers[0].path))
    return lambda: experts_left_out(type(stock), experts_classes=[kind], layers=layers)


def test_after_a_load_the_classes_are_as_they_were(checkpoint, expected, load):
    before = patched_state()
    load(checkpoint("qwen3_moe"))
    assert before == patched_state()
    assert [True] * 3 == same(expected(checkpoint("qwen3_moe")), tiny.play(tiny.stock(checkpoint("qwen3_moe"))))


@pytest.mark.parametrize(
    ("failure", "seen"), [(RuntimeError("no"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_after_a_load_that_failed_the_classes_are_as_they_were(checkpoint, load, monkeypatch, failure, seen):
    before = patched_state()
    folder = checkpoint("qwen3_moe")

    def fail(*args, **kwargs):
        assert before != patched_state(), "the load must be under way"
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", fail)
        with pytest.raises(seen):
            load(folder)
    assert before == patched_state()
    assert [True] == same([tiny.play(load(folder))[0]], [tiny.play(tiny.stock(folder))[0]])


def test_a_class_with_ignored_names_of_its_own_keeps_them(context, monkeypatch):
    kind = transformers.Qwen3MoeForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", ["mine"])
    with context():
        assert "mine" == kind._keys_to_ignore_on_load_unexpected[0]
        assert 1 + 2 == len(kind._keys_to_ignore_on_load_unexpected)
    assert ["mine"] == kind._keys_to_ignore_on_load_unexpected


def test_a_load_leaves_nothing_to_be_said_about_missing_or_unexpected_weights(checkpoint, load, caplog):
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    try:
        for model_type in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v4"):
            load(checkpoint(model_type))
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity_error()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("transformers")]
    assert [] == [message for message in said if "weights" in message or "UNEXPECTED" in message]


def test_a_stock_model_made_in_another_thread_meanwhile_keeps_its_experts(checkpoint, expected, context):
    folder = checkpoint("qwen3_moe")
    with context(), ThreadPoolExecutor(max_workers=1) as other:
        model = other.submit(tiny.stock, folder).result()
    assert [True] * 3 == same(expected(folder), tiny.play(model))


def test_another_threads_load_of_a_model_that_fits_keeps_its_experts(checkpoint, context):
    folder = checkpoint("qwen3_moe")
    with ThreadPoolExecutor(max_workers=1) as other:
        with context():
            waiting = other.submit(hotsplit.load, folder, hot_gib=1)
        model = waiting.result()
    stock = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).eval()
    assert [True] * 3 == same(tiny.play(stock), tiny.play(model))


def test_two_models_of_one_process_stay_apart(checkpoint, expected, load, tmp_path):
    names = ("qwen3_moe", "qwen3_moe", "mixtral")
    models = [
        load(checkpoint(name), hot=hot, dyn_steps=2, dyn_margin=1, state_dir=tmp_path / str(number))
        for number, (name, hot) in enumerate(zip(names, (0.5, 0.75, 0.5), strict=True))
    ]
    for _ in range(2):
        for name, model in zip(names, models, strict=True):
            assert [True] * 3 == same(expected(checkpoint(name)), tiny.play(model))
    models[0].hotsplit.close()
    assert [True] * 3 == same(expected(checkpoint("qwen3_moe")), tiny.play(models[1]))


def test_loads_in_several_threads_at_once_all_equal_stock(checkpoint, expected, tmp_path):
    names = ["qwen3_moe", "qwen3_moe", "mixtral", "qwen3_moe"]
    folders = [checkpoint(name) for name in names]
    wanted = [expected(folder) for folder in folders]
    start = threading.Barrier(len(folders))
    before = (patched_state(), torch.get_default_dtype())

    def run(number):
        start.wait()
        model = hotsplit.load(
            folders[number], hot_gib=budget(folders[number], 0.5), state_dir=tmp_path / str(number), dyn_steps=3
        )
        try:
            return tiny.play(model)
        finally:
            model.hotsplit.close()

    with ThreadPoolExecutor(max_workers=len(folders)) as pool:
        got = list(pool.map(run, range(len(folders))))
    assert [[True] * 3] * len(folders) == [same(*pair) for pair in zip(wanted, got, strict=True)]
    assert before == (patched_state(), torch.get_default_dtype()), "transformers changes the default type for a load"


def test_the_model_holds_no_routed_expert(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=0.0, dynamic=False)
    assert [] == [name for name, _ in model.named_parameters() if ".experts." in name]
    assert any(".experts." in name for name, _ in tiny.stock(checkpoint("qwen3_moe")).named_parameters())


def test_progress_of_the_hot_rows_is_told_to_the_end(checkpoint, load):
    told = []
    model = load(checkpoint("qwen3_moe"), dynamic=False, on_progress=lambda *seen: told.append(seen))
    row = int(model.hotsplit.sizes.row_bytes[0])
    assert [(row * n, row * 8) for n in range(1, 9)] == told


def side_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]


def test_a_model_that_goes_closes_its_engine(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")
    model = hotsplit.load(folder, hot_gib=budget(folder, 0.5), state_dir=tmp_path, dyn_steps=2, dyn_margin=1)
    tiny.play(model)
    assert 1 == len(side_threads())
    del model
    gc.collect()
    assert [] == side_threads()


def test_a_closed_model_refuses_to_compute(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), hot=1.0)
    model.hotsplit.close()
    model.hotsplit.close()
    with pytest.raises(BankError):
        tiny.play(model)


def test_what_was_counted_can_still_be_asked_after_closing(checkpoint, load):
    model = load(checkpoint("qwen3_moe"), dyn_steps=2)
    tiny.play(model)
    before = model.hotsplit.snapshot()
    model.hotsplit.close()
    assert before == model.hotsplit.snapshot()


def test_the_log_says_once_what_runs(checkpoint, load, caplog):
    caplog.set_level(logging.INFO, logger="hotsplit")
    load(checkpoint("qwen3_moe"), hot=0.5, dynamic=False)
    (line,) = [message for message in caplog.messages if message.startswith("hotsplit is on")]
    assert "2 layers, 8 of 16 experts hot" in line
    assert "no learned counts" in line


def test_a_load_that_fails_while_rows_are_built_gives_everything_back(checkpoint, load):
    def stop(done, total):
        raise HotsplitError("stopped")

    with pytest.raises(HotsplitError, match="stopped"):
        load(checkpoint("qwen3_moe"), on_progress=stop)
    assert [] == side_threads()


def test_the_adaptive_schedule_says_that_it_has_no_margin_and_warns_of_no_thrash(checkpoint, load, caplog):
    model = load(checkpoint("qwen3_moe"), dyn_schedule="adaptive", dyn_margin=1.5, dyn_half_life=0.5)
    told = [text for text in caplog.messages if "no effect" in text]
    assert ["HOTSPLIT_DYN_MARGIN has no effect: the adaptive schedule has no margin [no-effect]"] == told
    assert [] == [notice for notice in model.hotsplit.notices if notice.name == "may-thrash"]
