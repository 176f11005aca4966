"""Banks that compute on a GPU, with the real kernels in Triton's interpreter instead of their twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from bank.test_device_banks import TOP_K, E, build, run, source, tokens, wanted
from hotsplit.bank.kernels import rows_triton

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

fixtures = (build, source)
"""Used by name."""


@pytest.mark.parametrize("num_banks", [1, 2])
@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("hot", [((), ()), ((4, 1, 0), (2, 5, 3)), (range(E), range(E))], ids=["cold", "half", "hot"])
def test_outputs_equal_the_twins(build, source, hot, number, num_banks):
    drawn = tokens(number)
    found = run(build(num_banks=num_banks, hot=hot, experts=rows_triton.experts), drawn)
    torch.testing.assert_close(found, wanted(source, drawn), rtol=2**-6, atol=2**-4)


def test_outputs_are_equal_to_the_bit_while_experts_change_place(build):
    resting, moving = build(experts=rows_triton.experts), build(experts=rows_triton.experts, dynamic=True)
    generator = np.random.default_rng(3)
    for number in range(24):
        hidden, _, weights = tokens(1, seed=number)
        low = 3 if number // 8 % 2 else 0
        ids = torch.from_numpy(generator.choice(3, size=(1, TOP_K), replace=False) + low)
        assert torch.equal(run(resting, (hidden, ids, weights)), run(moving, (hidden, ids, weights)))
    assert moving.live.swaps.done > 2
