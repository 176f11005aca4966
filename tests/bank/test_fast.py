"""The fast kernel: within its derived bound on every path, and the same bits wherever rows lie and whoever computes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.fast import MOST_TOKENS, FastMath, NativeExperts, fast
from hotsplit.bank.kernels.fast_bound import output_and_bound
from hotsplit.bank.kernels.fast_library import ACTIVATIONS, KINDS, Form, Matrix

LIBRARY = fast_library.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")
PATHS = LIBRARY.paths if LIBRARY else ()
E = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
BLOCK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The experts of one layer; the fields that hotsplit.bank.kernels.reference calls Inner, and how rows are stored."""

    hidden_dim: int = 40
    inner_dim: int = 24
    dtype: torch.dtype = torch.bfloat16
    weights: torch.dtype | None = None
    activation: str = "silu"
    has_gate: bool = True
    gate_limit: float | None = None
    gate_slope: float = 1.0
    gate_shift: float = 0.0
    has_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    seed: int = 0

    @property
    def stored(self):
        return self.weights or self.dtype

    def numbers(self, *shape, scale=0.2):
        generator = torch.Generator().manual_seed(self.seed + sum(shape) * 7919)
        return torch.randn(*shape, generator=generator) * scale

    def experts(self):
        """Gate before other, [outputs, inputs], as the twins have them."""
        parts = 1 + self.has_gate
        shapes = {"up": (parts * self.inner_dim, self.hidden_dim), "down": (self.hidden_dim, self.inner_dim)}
        rows = []
        for expert in range(E):
            case = dataclasses.replace(self, seed=self.seed * 31 + expert)
            row = {name: case.numbers(*shape).to(self.stored) for name, shape in shapes.items()}
            if self.stored == FP8:
                for name, (outputs, inputs) in shapes.items():
                    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
                    row[f"{name}_scale"] = case.numbers(*blocks).abs() + 0.1
            if self.has_bias:
                for name, (outputs, _) in shapes.items():
                    row[f"{name}_bias"] = case.numbers(outputs + 1)[1:].to(self.dtype)
            rows.append(row)
        return rows

    def as_stored(self, row):
        found = dict(row)
        if self.is_interleaved:
            for name in ("up", "up_bias"):
                if name in row:
                    found[name] = torch.stack(row[name].chunk(2), dim=1).flatten(0, 1)
        if self.is_transposed:
            found |= {name: found[name].T.contiguous() for name in ("up", "down")}
        return found

    def native(self, path):
        outputs = (1 + self.has_gate) * self.inner_dim
        form = Form(
            up=self._matrix(outputs, self.hidden_dim),
            down=self._matrix(self.hidden_dim, self.inner_dim),
            token_kind=kind(self.dtype),
            path=PATHS.index(path),
            activation=ACTIVATIONS.index(self.activation),
            has_gate=self.has_gate,
            is_interleaved=self.is_interleaved,
            has_limit=self.gate_limit is not None,
            limit=self.gate_limit or 0.0,
            slope=self.gate_slope,
            shift=self.gate_shift,
        )
        names = ["up", "down", *(["up_bias", "down_bias"] if self.has_bias else [])]
        names += ["up_scale", "down_scale"] if self.stored == FP8 else []
        native = NativeExperts(LIBRARY, form=form, names={name: name for name in names}, dtype=self.dtype)
        return FastMath(function=None, num_experts=E, accumulate=None, native=native)

    def _matrix(self, outputs, inputs):
        matrix = Matrix(outputs=outputs, inputs=inputs, kind=kind(self.stored), is_transposed=self.is_transposed)
        matrix.bias_kind = kind(self.dtype)
        if self.stored == FP8:
            matrix.scale_outputs = matrix.scale_inputs = BLOCK
        return matrix


def kind(dtype):
    return KINDS.index(str(dtype).removeprefix("torch."))


def fields(row):
    """One expert in float64, factors applied."""
    found = {name: value.double() for name, value in row.items() if not name.endswith("_scale")}
    for name in ("up", "down"):
        if f"{name}_scale" in row:
            spread = row[f"{name}_scale"].double().repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
            found[name] = found[name] * spread[: found[name].shape[0], : found[name].shape[1]]
    return found


class Bank:
    """Row = expert where hot, expert + E where cold; every tensor `offset` bytes behind a cache line."""

    def __init__(self, rows, *, hot=range(E), offset=0, order=None):
        self.hot, self.order = set(hot), order
        self.rows = [{name: moved(value, offset=offset) for name, value in row.items()} for row in rows]

    def rows_of(self, ids):
        rows = torch.tensor([expert if expert in self.hot else expert + E for expert in range(E)])
        return torch.where((ids >= 0) & (ids < E), rows[ids.clamp(0, E - 1)], ids)

    first_cold = E

    def tensors(self, row):
        return self.rows[row % E]

    def ask(self, rows):
        assert all(row >= E for row in rows)

    def arrivals(self, rows):
        return iter(sorted(rows, key=self.order)) if self.order else iter(rows)


def moved(value, *, offset):
    """The same values at an address of that remainder."""
    offset -= offset % value.element_size()  # torch itself has no tensor at half an element
    buffer = torch.zeros(value.nbytes + 128, dtype=torch.uint8)
    start = (offset - buffer.data_ptr()) % 64
    view = buffer[start : start + value.nbytes].view(value.dtype).view(value.shape)
    return view.copy_(value)


def traffic(case, num_tokens, *, top_k=3, sentinels=False):
    generator = torch.Generator().manual_seed(case.seed + num_tokens)
    hidden = torch.randn(num_tokens, case.hidden_dim, generator=generator).to(case.dtype)
    ids = torch.stack([torch.randperm(E, generator=generator)[:top_k] for _ in range(num_tokens)])
    if sentinels:
        ids[0, 0], ids[-1, -1] = -1, E
    return hidden, ids, torch.rand(num_tokens, top_k, generator=generator).to(case.dtype)


def run(case, trial, *, bank, path, threads=1):
    hidden, ids, weights = trial
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return fast(
            hidden,
            topk_ids=ids,
            topk_weights=weights,
            row_ids=bank.rows_of(ids),
            bank=bank,
            math=case.native(path),
        )
    finally:
        torch.set_num_threads(before)


def error_share(case, trial, result, *, rows):
    """The largest error as a share of the bound."""
    hidden, ids, weights = trial
    experts = [
        (fields(row), torch.where(ids == expert, weights.double(), 0.0).sum(dim=1)) for expert, row in enumerate(rows)
    ]
    truth, bound = output_and_bound(hidden.double(), experts=experts, inner=case, dtype=case.dtype)
    return float(((result.double() - truth).abs() / bound).max())


gates = st.sampled_from(
    [
        {},
        {"activation": "gelu"},
        {"activation": "gelu_tanh"},
        {"activation": "relu2", "has_gate": False},
        {"activation": "relu"},
        {"gate_limit": 1.0, "gate_slope": 1.702, "gate_shift": 1.0, "has_bias": True},
        {"gate_limit": 0.5, "gate_slope": 1.702, "gate_shift": 1.0, "is_interleaved": True, "has_bias": True},
        {"is_transposed": True},
        {"is_transposed": True, "is_interleaved": True, "has_bias": True},
    ]
)


@pytest.mark.parametrize("path", PATHS)
@given(
    dtype=st.sampled_from(DTYPES),
    hidden_dim=st.integers(1, 150),
    inner_dim=st.integers(1, 90),
    gate=gates,
    num_tokens=st.integers(1, MOST_TOKENS),
    top_k=st.integers(1, E),
    sentinels=st.booleans(),
    offset=st.sampled_from([0, 2, 30]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_shape_and_form_stays_within_the_bound(  # noqa: PLR0917 - hypothesis passes them by name
    path, dtype, hidden_dim, inner_dim, gate, num_tokens, top_k, sentinels, offset, threads, seed
):
    case = Case(hidden_dim=hidden_dim, inner_dim=inner_dim, dtype=dtype, seed=seed, **gate)
    rows = case.experts()
    trial = traffic(case, num_tokens, top_k=top_k, sentinels=sentinels)
    bank = Bank([case.as_stored(row) for row in rows], hot={0, 3}, offset=offset)
    assert error_share(case, trial, run(case, trial, bank=bank, path=path, threads=threads), rows=rows) < 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_dim", "inner_dim"), [(48, 32), (70, 40), (512, 64)])
def test_block_float8_stays_within_the_bound(path, dtype, hidden_dim, inner_dim):
    case = Case(hidden_dim=hidden_dim, inner_dim=inner_dim, dtype=dtype, weights=FP8)
    rows = case.experts()
    trial = traffic(case, 7)
    assert error_share(case, trial, run(case, trial, bank=Bank(rows, offset=1), path=path), rows=rows) < 1


@pytest.mark.parametrize("path", PATHS)
def test_narrow_weights_serve_wide_tokens(path):
    case = Case(dtype=torch.float32, weights=torch.bfloat16)
    rows = case.experts()
    trial = traffic(case, 3)
    assert error_share(case, trial, run(case, trial, bank=Bank(rows), path=path), rows=rows) < 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["up", "down"])
def test_a_weight_that_is_wrong_shows(path, dtype, part):
    case = Case(dtype=dtype, hidden_dim=64, inner_dim=33)
    rows = case.experts()
    trial = traffic(case, 4, top_k=E)
    wrong = [{**row, part: row[part] * (1.1 if dtype == torch.bfloat16 else 1.02)} for row in rows]
    result = run(case, trial, bank=Bank(wrong), path=path)
    assert error_share(case, trial, result, rows=rows) > 1


@pytest.mark.parametrize("path", PATHS)
@given(
    dtype=st.sampled_from(DTYPES),
    gate=gates,
    hot=st.sets(st.integers(0, E - 1)),
    offset=st.sampled_from([0, 2, 4, 62]),
    threads=st.sampled_from([1, 2]),
    num_tokens=st.integers(1, MOST_TOKENS),
    backwards=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_placement_alignment_arrival_and_threads_change_no_bit(  # noqa: PLR0917 - the same
    path, dtype, gate, hot, offset, threads, num_tokens, backwards
):
    case = Case(dtype=dtype, hidden_dim=140, inner_dim=70, **gate)
    rows = [case.as_stored(row) for row in case.experts()]
    trial = traffic(case, num_tokens)
    expected = run(case, trial, bank=Bank(rows), path=path)
    bank = Bank(rows, hot=hot, offset=offset, order=(lambda row: -row) if backwards else None)
    assert torch.equal(expected, run(case, trial, bank=bank, path=path, threads=threads))


@pytest.mark.parametrize("path", PATHS)
@given(dtype=st.sampled_from(DTYPES), gate=gates, num_tokens=st.integers(2, MOST_TOKENS), first=st.integers(0, 14))
@settings(max_examples=40, deadline=None)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(path, dtype, gate, num_tokens, first):
    case = Case(dtype=dtype, hidden_dim=140, inner_dim=70, **gate)
    bank = Bank([case.as_stored(row) for row in case.experts()])
    trial = traffic(case, num_tokens)
    together = run(case, trial, bank=bank, path=path)
    first %= num_tokens
    alone = run(case, tuple(one[first : first + 1].contiguous() for one in trial), bank=bank, path=path)
    assert torch.equal(together[first : first + 1], alone)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["tokens", "up", "down"])
def test_what_is_not_finite_stays_so(path, value, place):
    case = Case(hidden_dim=33, inner_dim=17)
    rows, (hidden, ids, weights) = case.experts(), traffic(case, 2, top_k=E)
    if place == "tokens":
        hidden[0, 32] = value
    else:
        rows[2][place][16, -1] = value
    result = run(case, (hidden, ids, weights), bank=Bank(rows), path=path)
    assert not result[0].isfinite().all()
    if place == "tokens":
        assert result[1].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_a_float8_weight_that_is_no_number_stays_so(path):
    case = Case(hidden_dim=32, inner_dim=32, weights=FP8)
    rows = case.experts()
    rows[0]["up"].view(torch.uint8)[3, 5] = 0x7F
    trial = traffic(case, 1, top_k=E)
    assert run(case, trial, bank=Bank(rows), path=path).isnan().any()


@pytest.mark.parametrize("path", PATHS)
def test_every_float8_number_has_its_value(path):
    """All 256 of them, one per output, times one."""
    case = Case(hidden_dim=256, inner_dim=16, dtype=torch.float32, weights=FP8, activation="relu", has_gate=False)
    rows = case.experts()
    codes = torch.arange(256, dtype=torch.uint8)
    for row in rows:
        row["up"], row["down"] = torch.zeros(16, 256), torch.zeros(256, 16)
        row["up"][0, 0] = 1.0
        row["up"], row["down"] = row["up"].to(FP8), row["down"].to(FP8)
        row["down"].view(torch.uint8)[:, 0] = codes
        row["up_scale"], row["down_scale"] = torch.ones(1, 16), torch.ones(16, 1)
    hidden = torch.zeros(1, 256)
    hidden[0, 0] = 1.0
    trial = (hidden, torch.tensor([[1]]), torch.ones(1, 1))
    expected = codes.view(FP8).float()
    assert torch.equal(expected.nan_to_num(nan=-1), run(case, trial, bank=Bank(rows), path=path)[0].nan_to_num(nan=-1))


@pytest.mark.parametrize("path", PATHS)
def test_a_token_that_names_an_expert_often_gets_it_as_often(path):
    case = Case()
    rows = case.experts()
    hidden, _, weights = traffic(case, MOST_TOKENS)
    ids = torch.full((MOST_TOKENS, 3), 2)  # 48 pairs of one expert
    result = run(case, (hidden, ids, weights), bank=Bank(rows), path=path)
    assert error_share(case, (hidden, ids, weights), result, rows=rows) < 1


@pytest.mark.parametrize("path", PATHS)
def test_no_pair_gives_zeros(path):
    case = Case()
    hidden, ids, weights = traffic(case, 2)
    result = run(case, (hidden, torch.full_like(ids, -1), weights), bank=Bank(case.experts()), path=path)
    assert torch.equal(torch.zeros_like(hidden), result)


def test_tokens_that_do_not_lie_side_by_side_are_read_right():
    case = Case()
    rows = case.experts()
    hidden, ids, weights = traffic(case, 4)
    strided = torch.stack([hidden, torch.full_like(hidden, float("nan"))], dim=2)[..., 0]
    expected = run(case, (hidden, ids, weights), bank=Bank(rows), path=PATHS[-1])
    assert torch.equal(expected, run(case, (strided, ids, weights), bank=Bank(rows), path=PATHS[-1]))


def test_more_tokens_and_other_types_are_the_exact_kernels():
    case = Case()
    seen = []

    def function(tensors, tokens):
        seen.append(len(tokens))
        return torch.zeros_like(tokens)

    math = dataclasses.replace(case.native(PATHS[-1]), function=function)
    bank = Bank(case.experts())
    most = math.native.most_pairs * E // 3
    for num_tokens, dtype in ((most + 1, case.dtype), (1, torch.float32), (MOST_TOKENS, case.dtype)):
        hidden, ids, weights = traffic(case, num_tokens)
        seen.clear()
        fast(hidden.to(dtype), topk_ids=ids, topk_weights=weights, row_ids=ids, bank=bank, math=math)
        assert (num_tokens > MOST_TOKENS or dtype != case.dtype) == bool(seen)  # top-3


def test_addresses_follow_the_mapping_and_not_the_row():
    native = Case().native(PATHS[-1]).native
    first, second = (dict.fromkeys(("up", "down"), torch.zeros(n)) for n in (3, 4))
    found = [list(native.cold_addresses(7, tensors)) for tensors in (first, first, second)]
    assert found[0] == found[1] != found[2]
    assert [tensors["up"].data_ptr() for tensors in (first, first, second)] == [one[0] for one in found]


def test_another_bank_is_served_after_forgetting_and_not_before():
    case = Case()
    math, trial = case.native(PATHS[-1]), traffic(Case(), 3)
    banks = [Bank(dataclasses.replace(case, seed=seed).experts()) for seed in (1, 2)]

    def computed(bank):
        hidden, ids, weights = trial
        return fast(hidden, topk_ids=ids, topk_weights=weights, row_ids=ids, bank=bank, math=math)

    first = computed(banks[0])
    assert torch.equal(first, computed(banks[1]))
    math.native.forget()
    assert not torch.equal(first, computed(banks[1]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("hot", [(), (0, 2), range(E)])
def test_bits_do_not_depend_on_how_the_work_is_cut(path, hot):
    """Units are as wide as the number of threads allows: here 32 to 256 inner values, and 64 to 512 outputs."""
    case = Case(hidden_dim=1100, inner_dim=700)
    trial = traffic(case, 2)
    bank = Bank(case.experts(), hot=hot)
    results = [run(case, trial, bank=bank, path=path, threads=threads) for threads in (1, 2, 3, 8, 16)]
    assert all(torch.equal(results[0], result) for result in results)
    assert error_share(case, trial, results[0], rows=bank.rows) < 1


def test_rounding_to_float16_is_torchs_on_every_path():
    """Inner values of float16 tokens, from the whole range of magnitudes: weights that hand them through."""
    values = torch.from_numpy(np.geomspace(1e-9, 6e4, 997).astype(np.float32))
    for path in PATHS:
        case = Case(hidden_dim=997, inner_dim=997, dtype=torch.float16, activation="relu", has_gate=False)
        rows = [{"up": torch.eye(997, dtype=torch.float16), "down": torch.eye(997, dtype=torch.float16)}] * E
        hidden = values.to(torch.float16)[None]
        trial = (hidden, torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.float16))
        assert torch.equal(hidden, run(case, trial, bank=Bank(rows), path=path))
