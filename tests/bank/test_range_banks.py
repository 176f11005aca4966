"""The handle over stitched ranges: what a step counts, which rows it is told, and whole bytes while experts move."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.kernels import reference
from hotsplit.bank.range_banks import RangeBankOptions, RangeBanks
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.rows import place
from hotsplit.errors import BankError
from hotsplit.metrics import UpdateLine
from hotsplit.plan.rebalance import RebalanceOptions
from patience import finish

E = 6
HOT = [(4, 1), (0, 3, 5)]
EAGER = RebalanceOptions(margin=1.0, half_life=1.0, max_swaps=2)
"""Swaps whenever it would serve a single pair more."""


class Bank:
    """Two layers of six experts, and fixed ones behind them, whose bytes say in both tensors whose they are."""

    def __init__(self, folder, *, fixed=0, prior=None, **options):
        options = {"top_k": 2, "dynamic": False} | options
        dynamic = options["dynamic"]
        self.layers = [place(hot, num_experts=E, spare=dynamic, inclusive=False, fixed=fixed) for hot in HOT]
        self.file = BankFile(folder)
        self.rows = RangeRows(self.layers, memory=FileMemory(self.file))
        self.tensors = [self._load(layer_id, layer) for layer_id, layer in enumerate(self.layers)]
        options = RangeBankOptions(**({"rebalance": EAGER} | options))
        self.banks = RangeBanks(self.rows, layers=self.layers, prior=prior, options=options)

    def _load(self, layer_id, layer):
        weight = self.rows.allocate(layer_id, shape=(layer.num_rows, 301, 16), dtype=torch.int32)
        bias = torch.empty(layer.num_rows, 3, dtype=torch.int64)
        for expert, row in enumerate((*layer.row_map, *layer.fixed_rows)):
            weight[row] = bias[row] = owner(layer_id, expert)
        self.rows.register(layer_id, [weight, bias])
        return weight, bias

    def step(self, ids, *, phase="decode", is_padding=None, dtype=torch.int64):
        """One engine step, all layers with the same ids; the rows that it was told, per layer."""
        self.banks.tick()
        with self.banks.step(phase):
            return [self.route(layer_id, ids, is_padding=is_padding, dtype=dtype) for layer_id in range(len(HOT))]

    def route(self, layer_id, ids, *, is_padding=None, dtype=torch.int64):
        mask = None if is_padding is None else torch.as_tensor(is_padding)
        return self.banks.route(layer_id, torch.tensor(ids, dtype=dtype), is_padding=mask)

    def expected(self, layer_id, ids, *, is_padding=None):
        """The same by the specification."""
        row_map = self.banks.router.row_map[layer_id]
        mask = None if is_padding is None else torch.tensor(is_padding)
        return reference.route(torch.tensor(ids), row_map=row_map, is_padding=mask).tolist()

    @property
    def counters(self):
        return self.banks.router.counters

    def close(self):
        self.banks.close()
        self.file.close()


def owner(layer_id, expert):
    return 100 * (layer_id + 1) + expert


@pytest.fixture
def make(tmp_path):
    made = []

    def run(**options):
        made.append(Bank(tmp_path, **options))
        return made[-1]

    yield run
    for bank in made:
        bank.close()


@pytest.fixture
def bank(make):
    return make()


def test_what_is_routed_in_a_step_is_counted_and_outside_of_one_only_mapped(bank):
    outside = bank.route(0, [[4, 2], [1, 1]])
    inside = bank.step([[4, 2], [1, 1]])[0]
    after = bank.route(0, [[5, 5]])
    bank.banks.tick()
    assert bank.expected(0, [[4, 2], [1, 1]]) == outside.tolist() == inside.tolist()
    assert bank.expected(0, [[5, 5]]) == after.tolist()
    assert [[0, 2, 1, 0, 1, 0]] * 2 == bank.counters.counts["decode"].tolist()
    assert (1, 2, 3) == (bank.counters.steps, bank.counters.tokens["decode"], bank.counters.hits["decode"])


def test_the_phase_of_a_step_is_that_of_all_it_counts(bank):
    bank.step([[4, 2]], phase="prefill")
    bank.step([[1, 2], [1, 2]])
    assert {"prefill": 1, "decode": 2} == bank.counters.tokens
    assert [0, 0, 1, 0, 1, 0] == bank.counters.counts["prefill"][0].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_have_the_type_of_the_ids(bank, dtype):
    ids = [[4, 0], [5, -1]]
    rows = bank.step(ids, dtype=dtype)[1]
    assert (dtype, bank.expected(1, ids)) == (rows.dtype, rows.tolist())


def test_an_id_of_minus_one_stays_and_is_not_counted(bank):
    rows = bank.step([[-1, 2], [-1, -1]])[0]
    assert [-1, -1, -1] == [rows[0, 0], rows[1, 0], rows[1, 1]]
    assert [0, 0, 1, 0, 0, 0] == bank.counters.counts["decode"][0].tolist()


@pytest.mark.parametrize("dynamic", [False, True])
def test_ids_behind_the_experts_are_fixed_rows_and_never_counted(make, dynamic):
    bank = make(fixed=2, dynamic=dynamic)
    rows = bank.step([[E, 1], [E + 1, E]])[0]
    first = bank.layers[0].num_hot
    assert [[first, bank.layers[0].row_map[1]], [first + 1, first]] == rows.tolist()
    assert [[0, 1, 0, 0, 0, 0]] * 2 == bank.counters.counts["decode"].tolist()
    for name, value in {"steps": 1, "tokens": {"decode": 2, "prefill": 0}}.items():
        assert value == getattr(bank.counters, name)


def test_padding_is_not_counted_and_goes_to_a_real_tokens_rows(bank):
    ids, mask = [[3, 2], [4, 5], [0, 0]], [True, False, True]
    rows = bank.step(ids, is_padding=mask)[0]
    assert [bank.expected(0, [[4, 5]])[0]] * 3 == rows.tolist() == bank.expected(0, ids, is_padding=mask)
    assert [0, 0, 0, 0, 1, 1] == bank.counters.counts["decode"][0].tolist()
    assert 1 == bank.counters.tokens["decode"]


def test_padding_alone_goes_to_row_zero_and_counts_no_token(bank):
    assert [[0, 0], [0, 0]] == bank.step([[3, 2], [4, 5]], is_padding=[True, True])[0].tolist()
    assert (0, 0) == (bank.counters.tokens["decode"], int(bank.counters.counts["decode"].sum()))


def test_padding_is_redirected_outside_of_a_step_too(bank):
    assert [[0, 0]] == bank.route(0, [[3, 2]], is_padding=[True]).tolist()


def test_a_mask_may_be_longer_than_the_tokens(bank):
    rows = bank.step([[3, 2], [4, 5]], is_padding=[True, False, True, True])[0]
    assert [bank.expected(0, [[4, 5]])[0]] * 2 == rows.tolist()
    rows = bank.step([[3, 2], [4, 5]], is_padding=[False, False, True])[0]
    assert bank.expected(0, [[3, 2], [4, 5]]) == rows.tolist()
    assert 1 + 2 == bank.counters.tokens["decode"]


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_engine_may_write_every_steps_mask_into_the_same_tensor(bank, warm_up):
    mask = torch.tensor([warm_up, warm_up])
    bank.route(0, [[3, 2], [4, 5]], is_padding=mask)
    for padding in ([True, False], [False, False], [False, True], [False, False]):
        mask[:] = torch.tensor(padding)
        rows = bank.step([[3, 2], [4, 5]], is_padding=mask)[0]
        assert bank.expected(0, [[3, 2], [4, 5]], is_padding=padding) == rows.tolist()
    assert 1 + 2 + 1 + 2 == bank.counters.tokens["decode"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_breaks_off_is_forgotten(bank, error):
    def break_off():
        with bank.banks.step("decode"):
            bank.route(0, [[4, 2]], is_padding=[True])
            raise error

    with pytest.raises(error):
        break_off()
    assert (0, 0) == (bank.counters.steps, int(bank.counters.counts["decode"].sum()))
    bank.step([[1, 1]])
    assert (1, [0, 2, 0, 0, 0, 0]) == (bank.counters.steps, bank.counters.counts["decode"][0].tolist())


@st.composite
def routings(draw):
    """Ids [T, K] with sentinels, and a mask of those tokens or none."""
    num_tokens, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    token = st.lists(st.integers(-1, E - 1), min_size=top_k, max_size=top_k)
    ids = draw(st.lists(token, min_size=num_tokens, max_size=num_tokens))
    mask = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    return ids, draw(st.none() | mask), draw(st.sampled_from([torch.int32, torch.int64]))


def test_rows_and_counts_are_those_of_the_specification(tmp_path):
    bank = Bank(tmp_path)
    counted = Counter()

    @given(routings())
    def check(routing):
        ids, mask, dtype = routing
        for layer_id, rows in enumerate(bank.step(ids, is_padding=mask, dtype=dtype)):
            assert (dtype, bank.expected(layer_id, ids, is_padding=mask)) == (rows.dtype, rows.tolist())
        real = [token for i, token in enumerate(ids) if mask is None or not mask[i]]
        counted.update(expert for token in real for expert in token if expert >= 0)
        assert [[counted[e] for e in range(E)]] * 2 == bank.counters.counts["decode"].tolist()

    check()
    bank.close()


def shifting(num_steps, *, seed=3):
    """Ids of every step, [T, 2]: nine of ten pairs of two experts, which change every so often."""
    random = Random(seed)
    for number in range(num_steps):
        wanted = [(2 * (number // 10) + i) % E for i in range(2)]
        yield [[random.choice(wanted) if random.random() < 0.9 else random.randrange(E) for _ in "ab"] for _ in "abcd"]


def settle(bank):
    """Wait for the copies under way: the machine of a test may be slow, and its steps are very short."""
    finish(bank.banks._swaps._worker)


def test_experts_stay_whole_in_every_step_while_they_move_both_ways(make):
    bank = make(dynamic=True, dyn_steps=1)
    for ids in shifting(150):
        every = [[e, e] for e in range(E)]
        for layer_id, rows in enumerate(bank.step(ids + every)):
            for expert, row in enumerate(rows[-E:, 0].tolist()):
                assert [True, True] == [bool((t[row] == owner(layer_id, expert)).all()) for t in bank.tensors[layer_id]]
        settle(bank)
    assert bank.banks.live.swaps.done > 20
    assert 0 == bank.banks.live.swaps.failed


def test_hits_are_those_of_the_map_that_served_the_step(make):
    bank, hits, maps = make(dynamic=True, dyn_steps=2), 0, set()
    for ids in shifting(150):
        bank.banks.tick()
        hot_LE = bank.banks.router.hot_mask().copy()
        maps.add(hot_LE.tobytes())
        with bank.banks.step("decode"):
            for layer_id in range(len(HOT)):
                bank.route(layer_id, ids)
        hits += sum(int(hot_LE[layer_id, e]) for layer_id in range(len(HOT)) for token in ids for e in token)
        assert hits == bank.counters.hits["decode"]
        settle(bank)
    assert len(maps) > 5, "experts must have moved, or the test means nothing"


def lines(caplog):
    return [UpdateLine.parse(message) for message in caplog.messages if message.startswith("hotsplit update=")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_line_is_logged_at_every_update_in_either_mode(make, caplog, dynamic):
    caplog.set_level("INFO", logger="hotsplit")
    bank = make(dynamic=dynamic, dyn_steps=3, rank=5)
    for ids in shifting(10):
        bank.step(ids)
    bank.banks.tick()
    assert [(1, 3, 5), (2, 6, 5), (3, 9, 5)] == [(line.update, line.step, line.rank) for line in lines(caplog)]
    assert dynamic or not bank.banks.live.swaps.done


def test_static_mode_has_no_swapper_and_no_thread_of_its_own(make):
    bank = make(dynamic=False, dyn_steps=1)
    assert bank.banks.swapper is None
    before = bank.banks.router.row_map.tolist()
    for ids in shifting(30):
        bank.step(ids)
    assert before == bank.banks.router.row_map.tolist()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]


def test_the_prior_is_what_drift_is_measured_against(make, caplog):
    caplog.set_level("INFO", logger="hotsplit")
    prior = np.zeros((2, E))
    prior[:, 4] = 1.0
    bank = make(prior=prior, dyn_steps=1)
    for ids in ([[4, 4]], [[4, 3]]):
        bank.step(ids)
    bank.banks.tick()
    assert [0.0, 0.5] == [line.drift for line in lines(caplog)]


@pytest.mark.parametrize(("copies_ids", "expected"), [(True, [0, 1, 1, 0, 0, 0]), (False, [0, 0, 0, 0, 0, 2])])
def test_copied_ids_may_be_written_over_before_the_step_ends(make, copies_ids, expected):
    bank = make(copies_ids=copies_ids)
    ids = torch.tensor([[1, 2]])
    with bank.banks.step("decode"):
        rows = bank.banks.route(0, ids, is_padding=None)
        ids[:] = 5
    assert expected == bank.counters.counts["decode"][0].tolist()
    assert bank.expected(0, [[1, 2]]) == rows.tolist()


def test_the_lock_is_held_while_counters_change_and_not_while_a_step_runs(make):
    bank = make(dyn_steps=1)
    seen = []

    def is_held():
        """Seen from another thread: the one that holds it may have it again."""
        free = []

        def look():
            if bank.banks.lock.acquire(blocking=False):
                bank.banks.lock.release()
                free.append(True)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return not free

    bank.banks.router.observers.append(lambda _: seen.append(("counted", is_held())))
    bank.banks.live.on_update.append(lambda _: seen.append(("updated", is_held())))
    with bank.banks.step("decode"):
        bank.route(0, [[1, 2]])
        seen.append(("running", is_held()))
    bank.banks.tick()
    assert [("running", False), ("counted", True), ("updated", True)] == seen
    assert not is_held()


def test_closing_gives_the_memory_back_and_twice_is_harmless(make):
    bank = make(dynamic=True)
    assert bank.file.num_bytes > 0
    bank.banks.close()
    bank.banks.close()
    assert (0, ()) == (bank.file.num_bytes, bank.rows.ranges)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotsplit-side")]
    with pytest.raises(BankError, match="the banks are closed"):
        bank.rows.copy_row(0, source_row=0, target_row=1)
