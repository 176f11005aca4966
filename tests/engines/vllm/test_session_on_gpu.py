"""One worker's hotsplit on a GPU that is none: the product's backend over stand-ins, a toy model, and no vLLM."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from engines.vllm import test_session as on_cpu
from engines.vllm.planned_ranks import limits_of
from engines.vllm.test_session import LAYERS, NAME, E, expected, forward, load, scheduled, step
from engines.vllm.vllm_probe.hotsplit_probe.gpu import PAGE_BYTES, StandIn
from hotsplit.bank import runs
from hotsplit.bank.device_memory import DeviceMemory
from hotsplit.bank.fake_driver import NOTHING
from hotsplit.engines.vllm import backends, room, tuned
from hotsplit.engines.vllm import session as sessions
from hotsplit.errors import BankError, BudgetError

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that every worker gets, with room for everything."""
    stand_in = StandIn()
    monkeypatch.setattr(backends, "BACKENDS", {"cuda": stand_in.backend})
    monkeypatch.setattr(sessions, "_current", None)
    monkeypatch.setattr(sessions, "padding_mask", lambda: None)
    monkeypatch.setattr(tuned, "use_stock_counts", lambda counts: [])
    free_of(monkeypatch, 8 * GIB)
    yield stand_in
    if sessions.current() is not None:
        sessions.current().close()


def free_of(monkeypatch, *free_bytes):
    """What is free of the GPU, look after look; the last one stays."""
    looks = list(free_bytes)
    total = 10 * GIB
    monkeypatch.setattr(
        room,
        "gpu_memory",
        lambda: DeviceMemory(free_bytes=looks.pop(0) if len(looks) > 1 else looks[0], total_bytes=total),
    )


@pytest.fixture
def begin(tmp_path, gpu):
    """begin(DYNAMIC="0") -> a session that has not loaded."""

    def make(**more):
        decided = on_cpu.prepared(tmp_path, **more)
        return sessions.begin(replace(decided, place=replace(decided.place, device_type="cuda")))

    return make


def test_a_loaded_layer_computes_what_stock_does_while_its_experts_move(begin, gpu):
    session = begin()
    layers = load(session)
    seen, halves = set(), 0
    for number in range(90):
        wanted = number // 9 % E
        rows = step(session, [[expert, expert] for expert in range(E)] + [[wanted, (wanted + 1) % E]] * 20)
        for layer, row_ids in zip(layers, rows, strict=True):
            assert torch.equal(expected(), forward(layer, [row for row, _ in row_ids[:E]]))
        seen.add(str(rows[0][:E]))
        halves += gpu.streams.num_copies() > 0
    assert len(seen) > 3, "experts must have moved, or the test means nothing"
    assert halves > 3, "steps must have run beside copies"


def test_static_experts_stay_where_they_are(begin, gpu):
    session = begin(DYNAMIC="0")
    layers = load(session)
    ids = [[expert, expert] for expert in range(E)]
    before = step(session, ids)
    for number in range(20):
        step(session, [[number % E, (number + 1) % E]] * 20)
    after = step(session, ids)
    assert before == after
    assert torch.equal(expected(), forward(layers[0], [row for row, _ in after[0]]))
    assert "write" not in gpu.streams.asked


def test_what_is_published_and_lost_is_seen(begin, monkeypatch):
    deaf = StandIn(writes_maps=False)
    monkeypatch.setattr(backends, "BACKENDS", {"cuda": deaf.backend})
    session = begin()
    (layer, _) = load(session)
    rows = [row for row, _ in step(session, [[expert, expert] for expert in range(E)])[0]]
    for number in range(60):
        wanted = number // 6 % E
        step(session, [[wanted, (wanted + 1) % E]] * 20)
    assert "write" in deaf.streams.asked
    assert not torch.equal(expected(), forward(layer, rows))


def test_rows_are_of_the_drivers_memory_and_go_back_when_the_session_closes(begin, gpu):
    session = begin()
    load(session)
    assert "cuda-stitched" == session._backend.name
    assert session._memory.host_bytes == gpu.driver.held.host_bytes > 0
    assert 0 == gpu.driver.held.device_bytes % PAGE_BYTES
    step(session, [[1, 2]])
    before = gpu.num_settled
    session.close()
    assert gpu.num_settled > before, "rows were given back without waiting for the device"
    assert NOTHING == gpu.driver.held


def test_a_device_that_has_failed_keeps_the_rows_and_what_was_learned_is_saved(
    begin, gpu, tmp_path, caplog, monkeypatch
):
    session = begin()
    load(session)
    step(session, [[1, 2]])

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(session.banks.router, "settle", fail)
    object.__setattr__(session._backend, "settle", fail)
    session.close()
    assert (tmp_path / "learned").is_dir()
    assert "the last counts cannot be read: CUDA error" in caplog.text
    assert "memory of the rows goes with the process: CUDA error" in caplog.text
    assert gpu.driver.held.mappings > 0


def test_all_that_a_step_runs_has_run_once_when_the_model_is_loaded(begin, gpu, monkeypatch):
    ran = []
    parts = gpu.parts

    def watched(**more):
        made = parts(**more)
        route, begin_step = made.kernels.route_and_count, made.kernels.begin_step
        made.kernels.route_and_count = lambda ids, **given: (
            ran.append((ids.dtype, ids.shape[1], given["is_padding"] is not None)) or route(ids, **given)
        )
        made.kernels.begin_step = lambda step, **given: ran.append("step") or begin_step(step, **given)
        return made

    monkeypatch.setattr(gpu, "parts", watched)
    load(begin())
    kinds = {(dtype, 2, masked) for dtype in (torch.int32, torch.int64) for masked in (False, True)}
    assert kinds | {"step"} == set(ran)


def test_warm_up_and_capture_are_not_counted(begin):
    session = begin()
    load(session)
    for _ in range(5):
        session.route(torch.tensor([[1, 2]]), NAME(LAYERS[0]))  # as vLLM's dummy runs do, outside of any step
    step(session, [[3, 3]])
    session.banks.router.settle()
    assert [[0, 0, 0, 2, 0, 0]] * 2 == session.banks.router.counters.counts["decode"].tolist()


def test_who_asks_is_told_of_steps_that_the_host_has_not_read_yet(begin, tmp_path):
    session = begin(DYN_STEPS="2000")
    load(session)
    for _ in range(3):
        step(session, [[3, 3]])
    assert 0 == session.banks.router.counters.steps, "the host must lag, or the test means nothing"
    runs.ask(tmp_path / "run", word="now")
    assert 3 == on_cpu.wait_until_told(tmp_path / "run", "now")
    with session.banks.step("decode"):
        runs.ask(tmp_path / "run", word="later")
        time.sleep(1)
        assert "later" != runs.told(tmp_path / "run", rank=0)
    assert 4 == on_cpu.wait_until_told(tmp_path / "run", "later")


def test_nothing_is_asked_or_enqueued_while_a_graph_is_captured(begin, gpu):
    session = begin()
    load(session)
    for number in range(40):
        step(session, [[number % E, (number + 1) % E]] * 8)
        if gpu.streams.num_copies():
            break
    assert gpu.streams.num_copies(), "something must be under way, or the test means nothing"
    maps = session.banks.router.row_map.clone()
    gpu.streams.asked.clear()
    with gpu.streams.capture():  # in which every call of a stream is an error
        session.banks.tick()
        session.route(torch.tensor([[0, 1]], dtype=torch.int32), NAME(LAYERS[0]))
    assert [] == gpu.streams.asked
    assert torch.equal(maps, session.banks.router.row_map)
    for _ in range(20):
        step(session, [[1, 2]])
    assert "write" in gpu.streams.asked, "and afterwards it goes on"


def test_another_thread_is_told_of_the_driver_once(begin, gpu):
    session = begin()
    load(session)
    step(session, [[1, 2]])
    assert 0 == gpu.num_threads
    told = []

    def run():
        told.extend([step(session, [[1, 2]]), step(session, [[1, 2]])])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (2, 1) == (len(told), gpu.num_threads)
    step(session, [[1, 2]])
    assert 1 == gpu.num_threads, "the first one was told when it loaded"


def test_a_thread_that_may_have_the_number_of_one_that_ended_is_told_as_well(begin, gpu):
    session = begin()
    load(session)
    for _ in range(2):
        thread = threading.Thread(target=lambda: step(session, [[1, 2]]))
        thread.start()
        thread.join()
    assert 2 == gpu.num_threads


def test_a_backend_that_cannot_be_opened_leaves_the_next_engine_its_place(begin, gpu, monkeypatch):
    session = begin()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "BACKENDS", {"cuda": lambda options: (_ for _ in ()).throw(BankError("no driver"))})
        with pytest.raises(BankError, match="no driver"):
            load(session)
    assert session.is_closed
    assert 2 == len(load(begin()))


def test_a_check_that_refuses_gives_everything_back(begin, gpu):
    session = begin()
    load(session)
    with pytest.raises(BudgetError), session.closed_on_error():
        raise BudgetError("memory left after warm-up")
    assert NOTHING == gpu.driver.held
    assert 2 == len(load(begin()))


def test_two_banks_ask_the_host_for_all_experts_once(monkeypatch):
    monkeypatch.setattr(room, "memory_limits", lambda: limits_of(4 * GIB))
    room.require_stages(GIB, num_ranks=4)
    with pytest.raises(BudgetError, match="all experts, while they are loaded into two banks"):
        room.require_stages(2 * GIB, num_ranks=4)


def test_weights_that_are_read_from_the_host_bear_vllms_mark_and_others_do_not(begin):
    (layer, _) = load(begin())
    marked = {name for name, one in layer.named_parameters() if getattr(one, "_vllm_is_uva_offloaded", False)}
    assert {"w13_weight", "w2_weight"} == marked


def test_vllms_own_mask_is_read_anew_in_every_step(begin, monkeypatch):
    session = begin()
    load(session)
    mask = torch.zeros(8, dtype=torch.bool)
    monkeypatch.setattr(sessions, "padding_mask", lambda: mask[:3])
    with session.step(scheduled(2)):
        mask[2:] = True  # as vLLM fills its persistent mask before a graph is replayed
        rows = session.route(torch.tensor([[1, 2], [3, 4], [5, 0]]), NAME(LAYERS[0])).tolist()
    assert rows[0] == rows[2], "padding takes a real token's rows"
    session.banks.router.settle()
    assert [0, 1, 1, 1, 1, 0] == session.banks.router.counters.counts["prefill"][0].tolist()


# -- what is left of the GPU


def test_a_reserve_that_the_kv_cache_lies_in_is_kept(begin, monkeypatch):
    session = begin(VRAM_RESERVE_GIB="2")
    load(session)
    free_of(monkeypatch, 7 * GIB, GIB // 2)
    with session.memory_watch.making_kv_cache():
        pass
    session.memory_watch.require_reserve()


def test_a_reserve_that_is_not_kept_names_the_largest_budget_that_fits(begin, monkeypatch):
    session = begin(VRAM_RESERVE_GIB="2")
    load(session)
    free_of(monkeypatch, GIB, GIB // 2)
    with session.memory_watch.making_kv_cache():
        pass
    monkeypatch.setattr(type(session.banks.rows), "hot_bytes", property(lambda _: 5 * GIB))
    with pytest.raises(BudgetError, match=r"got 1.000 GiB; wanted the reserve of 2.000 GiB; set HOTSPLIT_HOT_GIB=4 or"):
        session.memory_watch.require_reserve()


def test_ranges_that_the_gpu_has_no_room_for_stop_the_load_and_leave_nothing(begin, gpu):
    gpu.driver.fail(5, call="cuMemCreate")  # two of the trial, two of the first range, and now hot rows of the second
    with pytest.raises(BankError, match="GPU memory for expert rows: .*lower HOTSPLIT_HOT_GIB"):
        load(begin())
    assert NOTHING == gpu.driver.held
