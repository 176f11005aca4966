"""Long calls of the fast kernel: native up to a border that the shape alone decides, with the bits of short ones."""

from __future__ import annotations

import pytest
import torch

from bank.test_fast import LIBRARY, PATHS, Bank, Case, E, error_share, run, traffic
from hotsplit.bank.kernels.fast import FEW_PAIRS, MANY_PAIRS, MOST_TOKENS

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code is not built here")
TOP_K = 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_of_a_token_are_those_of_a_short_call(path, dtype):
    case = Case(dtype=dtype)
    most = case.native(path).native.most_pairs * E
    hidden, ids, weights = trial = traffic(case, most, top_k=TOP_K)
    rows = case.experts()
    together = run(case, trial, bank=Bank(rows), path=path)
    parts = zip(hidden.split(MOST_TOKENS), ids.split(MOST_TOKENS), weights.split(MOST_TOKENS), strict=True)
    assert most > MOST_TOKENS
    assert torch.equal(together, torch.cat([run(case, part, bank=Bank(rows), path=path) for part in parts]))
    assert torch.equal(together, run(case, trial, bank=Bank(rows), path=path, threads=2))
    assert error_share(case, trial, together, rows=rows) < 1


def test_the_border_is_far_where_the_tokens_own_type_is_multiplied():
    borders = {
        dtype: Case(dtype=dtype).native("portable").native.most_pairs for dtype in (torch.float16, torch.float32)
    }
    assert {torch.float16: MANY_PAIRS, torch.float32: FEW_PAIRS} == borders
    for path in PATHS:
        wanted = MANY_PAIRS if path == "avx512_bf16" else FEW_PAIRS
        assert wanted == Case(dtype=torch.bfloat16).native(path).native.most_pairs
