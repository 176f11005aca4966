"""One worker's hotsplit from load to shutdown, over a toy model and without vLLM."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engines.vllm import toy_experts
from engines.vllm.toy_experts import W2_BYTES, W13_BYTES, E, expected, forward
from hotsplit.bank import file_memory, runs
from hotsplit.bank.ranges import BankFile
from hotsplit.config import HotsplitConfig
from hotsplit.engines.vllm import session as sessions
from hotsplit.engines.vllm import tuned
from hotsplit.engines.vllm.experts import HotsplitExperts
from hotsplit.engines.vllm.planning import Place, Prepared
from hotsplit.errors import BankError, EngineError, UnsupportedEngineError
from hotsplit.metrics import read_snapshot, snapshot_path
from hotsplit.plan.choose import PlanRequest, choose_plan
from hotsplit.plan.learned import load_learned
from patience import finish, until
from plan_builders import sizes_of

LAYERS = (3, 4)
SIZES = sizes_of([W13_BYTES + W2_BYTES] * 2, num_experts=E, top_k=2, first_layer=3)
FILES = []
NAME = "model.layers.{}.mlp.experts".format


class Stock(toy_experts.RoutedExperts):
    """The toy experts with the places that hotsplit's class hooks into."""

    def __init__(self, layer_name, params_dtype, moe_config, quant_config=None):
        super().__init__(quant_config=quant_config)
        self.layer_name, self.moe_config = layer_name, moe_config
        self.row_of = self._map_global_expert_id_to_local_expert_id
        self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)
        self.quant_method.create_weights(self, num_experts=moe_config.num_local_experts)

    def _get_quant_method(self, prefix, quant_config, moe_config):
        return toy_experts.Method()

    def _map_global_expert_id_to_local_expert_id(self, expert_id):
        return expert_id

    def forward_modular(self, x, topk_weights, topk_ids):
        return toy_experts.RoutedExperts.forward_rows(self, x, topk_weights, topk_ids)


class Covered(HotsplitExperts, Stock):
    pass


def build(name, *, num_experts=E, num_logical=E):
    """A layer as vLLM builds one, loaded and post-processed."""
    numbers = {"num_experts": num_experts, "num_local_experts": num_experts, "num_logical_experts": num_logical}
    layer = Covered(name, torch.float32, SimpleNamespace(in_dtype=torch.float32, **numbers))
    layer.load()
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def prepared(folder, *, is_stock=False, **more):
    environ = {"STATE_DIR": str(folder), "DYN_STEPS": "1", "DYN_MARGIN": "1"} | more
    config = HotsplitConfig.from_env({f"HOTSPLIT_{name}": value for name, value in environ.items()})
    choice = choose_plan(SIZES, request=PlanRequest(budget_bytes=2 * 4 * (W13_BYTES + W2_BYTES)))
    place = Place(rank=0, tp=1, tp_rank=0, pp=1, stage=0, run_dir=folder / "run", is_compiled=False)
    decided = Prepared(config=config, place=place, sizes=SIZES, is_stock=is_stock, plan_choice=choice)
    return replace(decided, asked_bytes=2**20)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No vLLM to look into, no session of another test, and an eye on the bank files that are made."""
    FILES.clear()
    init = BankFile.__init__
    monkeypatch.setattr(BankFile, "__init__", lambda self, folder: (FILES.append(self), init(self, folder))[1])
    monkeypatch.setattr(sessions, "_current", None)
    monkeypatch.setattr(sessions, "padding_mask", lambda: None)
    monkeypatch.setattr(tuned, "use_stock_counts", lambda counts: [])
    yield
    if sessions.current() is not None:
        sessions.current().close()


@pytest.fixture
def begin(tmp_path):
    """begin(DYNAMIC="0") -> a session that has not loaded."""
    return lambda **more: sessions.begin(prepared(tmp_path, **more))


def load(session, *names):
    with session.loading():
        return [build(name) for name in names or map(NAME, LAYERS)]


def scheduled(num_tokens=1):
    return SimpleNamespace(
        num_scheduled_tokens={"a": num_tokens}, scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=num_tokens
    )


def step(session, ids, *, num_tokens=1):
    """One engine step with these ids in every layer; the rows that they lie in."""
    with session.step(scheduled(num_tokens)):
        return [session.route(torch.tensor(ids), NAME(layer)).tolist() for layer in LAYERS]


def test_a_loaded_layer_computes_what_stock_does_while_its_experts_move(begin):
    session = begin()
    layers = load(session)
    seen = set()
    for number in range(60):
        wanted = number // 6 % E
        rows = step(session, [[expert, expert] for expert in range(E)] + [[wanted, (wanted + 1) % E]] * 20)
        for layer, row_ids in zip(layers, rows, strict=True):
            assert torch.equal(expected(), forward(layer, [row for row, _ in row_ids[:E]]))
        seen.add(str(rows[0][:E]))
        finish(session.banks._swaps._worker)
    assert len(seen) > 3, "experts must have moved, or the test means nothing"


def test_what_runs_is_said_in_one_line(begin, caplog):
    caplog.set_level("INFO", logger="hotsplit")
    load(begin())
    (line,) = [message for message in caplog.messages if message.startswith("hotsplit is on: ")]
    for part in ("mode=dynamic layers=2 hot_rows=6 of 12", "expected_hit=unknown", "backend=cpu-twin rank=0"):
        assert part in line


def test_layers_that_are_not_of_the_plan_run_stock_and_are_named(begin, caplog):
    caplog.set_level("INFO", logger="hotsplit")
    session = begin()
    others = ["model.layers.9.mlp.experts", "mtp.layers.3.mlp.experts", "draft.layers.4.mlp.experts", "moe.experts"]
    layers = load(session, *map(NAME, LAYERS), NAME(3), *others)
    assert [0, 1] == [layer.hotsplit_layer_id for layer in layers[:2]]
    assert {None} == {layer.hotsplit_layer_id for layer in layers[2:]}
    assert [E] * 5 == [layer.w13_weight.shape[0] for layer in layers[2:]]
    assert [NAME(3), *others] == session.left_alone
    assert f"left alone, as they are no layers of the plan: {', '.join([NAME(3), *others])}" in caplog.messages


def require_nothing_left(session):
    (file,) = FILES
    assert (-1, 0, ()) == (file.handle, file.num_bytes, session._memory.ranges)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-")]


def test_a_layer_that_is_missing_stops_the_start_and_leaves_nothing(begin):
    session = begin()
    with pytest.raises(UnsupportedEngineError, match="MoE layers of the model: got 1, without decoder layer 4"):
        load(session, NAME(3))
    require_nothing_left(session)


def test_rows_that_do_not_lie_where_the_plan_wants_them_stop_the_start(begin, monkeypatch):
    where = SimpleNamespace(misplaced_bytes=4096, hot_other_bytes=4096, cold_anonymous_bytes=0)
    monkeypatch.setattr(file_memory, "read_residency", lambda ranges: where)
    session = begin()
    with pytest.raises(BankError, match="where the rows lie: got 4.0 KiB of hot rows outside of memory of their own"):
        load(session)
    require_nothing_left(session)


def test_a_load_that_fails_leaves_nothing_and_another_may_begin(begin):
    session = begin()

    def fail():
        with session.loading():
            build(NAME(3))
            raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        fail()
    require_nothing_left(session)
    assert 2 == len(load(begin()))


@pytest.mark.parametrize(
    ("numbers", "got"),
    [
        ({"num_experts": 8, "num_logical": 8}, "8 routed and 0 fused shared experts"),
        ({"num_experts": 7, "num_logical": 6}, "6 routed and 1 fused shared experts"),
    ],
)
def test_a_layer_of_other_experts_than_the_plan_has_is_refused(begin, numbers, got):
    session = begin()
    with (
        pytest.raises(UnsupportedEngineError, match=f"layers.3.mlp.experts: got {got}; wanted 6 and 0"),
        session.loading(),
    ):
        build(NAME(3), **numbers)


def test_closing_saves_what_was_learned_and_lets_the_memory_go(begin, tmp_path):
    session = begin()
    layers = load(session)
    step(session, [[1, 2], [1, 3]])
    step(session, [[4, 4]], num_tokens=5)
    session.close()
    session.close()
    require_nothing_left(session)
    assert [0, 0, 0] == [parameter.numel() for parameter in layers[0].parameters()]
    learned, _ = load_learned(tmp_path, SIZES.identity)
    assert [[0, 2, 1, 1, 0, 0]] * 2 == learned.phases["decode"].counts.tolist()
    snapshot = read_snapshot(snapshot_path(tmp_path / "run", rank=0))
    assert ({"decode": 2, "prefill": 1}, 2) == (snapshot.tokens, snapshot.steps)


@pytest.mark.parametrize("more", [{"LEARNED": "ignore"}, {"DYNAMIC": "0"}])
def test_nothing_is_learned_in_static_mode_or_where_it_is_to_be_ignored(begin, tmp_path, more):
    session = begin(**more)
    load(session)
    step(session, [[1, 2]])
    session.close()
    assert not (tmp_path / "learned").exists()


def test_the_snapshot_file_follows_the_steps_while_the_model_runs(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "TELL_EVERY_S", 0.01)
    session = begin()
    load(session)
    path = snapshot_path(tmp_path / "run", rank=0)
    for num_steps in (1, 2):
        step(session, [[1, 2]])
        until(lambda wanted=num_steps: path.exists() and read_snapshot(path).steps == wanted)
        assert num_steps == read_snapshot(path).steps == session.snapshot().steps


def wait_until_told(folder, word):
    """The steps of the snapshot that a word was answered with."""
    until(lambda: runs.told(folder, rank=0) == word)
    return read_snapshot(snapshot_path(folder, rank=0)).steps


def test_who_asks_gets_a_snapshot_of_every_step_that_has_ended_however_rarely_it_is_written(begin, tmp_path):
    session = begin()
    load(session)
    for num_steps in (1, 2):
        step(session, [[1, 2]])
        runs.ask(tmp_path / "run", word=f"word {num_steps}")
        assert num_steps == wait_until_told(tmp_path / "run", f"word {num_steps}")


def test_who_asks_while_a_step_runs_is_answered_when_it_has_ended(begin, tmp_path):
    session = begin()
    load(session)
    with session.banks.step("decode"):
        runs.ask(tmp_path / "run", word="early")
        time.sleep(1)
        assert "early" != runs.told(tmp_path / "run", rank=0)
    assert 0 == wait_until_told(tmp_path / "run", "early")


def test_who_asks_is_answered_also_where_one_step_follows_another_without_a_pause(begin, tmp_path):
    session = begin()
    load(session)
    has_ended, waited = threading.Event(), threading.Event()

    def run():
        while not has_ended.is_set():
            with session.banks.step("decode"):
                waited.wait(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for number in range(3):
            runs.ask(tmp_path / "run", word=f"word {number}")
            assert 0 == wait_until_told(tmp_path / "run", f"word {number}")
    finally:
        has_ended.set()
        thread.join()


def test_a_word_that_lay_there_at_the_start_is_not_answered(begin, tmp_path):
    (tmp_path / "run").mkdir()
    runs.ask(tmp_path / "run", word="old")
    session = begin()
    load(session)
    runs.ask(tmp_path / "run", word="new")
    assert 0 == wait_until_told(tmp_path / "run", "new")


def test_a_second_model_in_one_process_is_refused_until_the_first_has_ended(begin):
    first = begin()
    with pytest.raises(EngineError, match="a second model in one process.*shut the first engine down"):
        begin()
    first.close()
    assert first is not begin()


def test_without_a_session_a_layer_cannot_be_built():
    with pytest.raises(EngineError, match="a layer of routed experts is built before its worker has planned"):
        build(NAME(3))


def test_before_the_model_is_loaded_there_are_no_banks_and_no_numbers(begin):
    session = begin()
    for ask in (lambda: session.banks, session.snapshot):
        with pytest.raises(EngineError, match="got a model that is not loaded yet"):
            ask()


def test_where_everything_fits_layers_are_stock_and_nothing_is_taken(tmp_path):
    session = sessions.begin(prepared(tmp_path, is_stock=True))
    (layer,) = load(session, NAME(3))
    assert (None, E) == (layer.hotsplit_layer_id, layer.w13_weight.shape[0])
    assert (None, []) == (session._memory, session.left_alone)
    session.memory_watch.require_reserve()
    session.close()
    assert torch.equal(expected(), forward(layer, list(range(E))))


def test_a_layer_that_is_built_outside_of_its_models_load_is_refused(begin):
    begin()
    with pytest.raises(
        EngineError, match="layers.3.mlp.experts: got a layer that is built outside of its model's load"
    ):
        build(NAME(3))
