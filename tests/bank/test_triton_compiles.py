"""Without a GPU or a driver: what the kernels become on each target, from the launches that a model would make.

A spill or a narrow load makes a kernel several times slower and changes no result, so only the code tells.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton

from bank.compiled import SHARED_LIMITS, TARGETS, compiled, recorded
from hotsplit.bank.kernels import route_triton, rows_triton
from hotsplit.bank.kernels.reference import FP8, ExpertRows, LayerCounters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process, it does not compile"),
]

TOP_K = 8
DEEPSEEK = (257, 7168, 2048)
QWEN = (129, 2048, 768)
ODD = (33, 2880, 1408)
"""R, D, I; of ODD neither D nor I is a multiple of every tile, and D is none of 128."""
WIDE_LOAD = r"LDG\.E\S*\.128|LDGSTS\.E\S*\.128"
NARROW_LOAD = r"LDG\.E\.[US](8|16)|LDGSTS\.E\.[US](8|16)"


@pytest.fixture(autouse=True, scope="module")
def no_cache(tmp_path_factory):
    """What is compiled here is compiled now, and nothing is left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def tensor(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(num_rows, hidden_dim, inner_dim, *, dtype, **options):
    """Rows of a layer as it is on a GPU, without their bytes."""
    up, down = (num_rows, 2 * inner_dim, hidden_dim), (num_rows, hidden_dim, inner_dim)
    if dtype == FP8:
        for name, (_, outputs, inputs) in {"up_scale": up, "down_scale": down}.items():
            options[name] = tensor(num_rows, -(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
    return ExpertRows(up=tensor(*up, dtype=dtype), down=tensor(*down, dtype=dtype), first_cold=9, **options)


def expert_launches(rows, *, num_tokens, dtype=torch.bfloat16):
    with recorded() as launches:
        rows_triton.experts(
            tensor(num_tokens, rows.down.shape[1], dtype=dtype),
            row_ids=tensor(num_tokens, TOP_K),
            topk_weights=tensor(num_tokens, TOP_K, dtype=torch.float32),
            rows=rows,
        )
    return launches


def route_launch(*, num_tokens=4, num_experts=64, dtype=torch.int64, padding="redirected", first_cold=9):
    counters = LayerCounters(
        pairs=tensor(2, num_experts), totals=tensor(2, 4), stamps=tensor(num_experts), step=tensor(2)
    )
    with recorded() as launches:
        route_triton.route_and_count(
            tensor(num_tokens, TOP_K, dtype=dtype),
            row_map=tensor(num_experts),
            is_padding=None if padding == "none" else tensor(8192, dtype=torch.bool),
            counters=counters,
            first_cold=first_cold,
            redirect_padding=padding == "redirected",
        )
    (launch,) = launches
    return launch


def publish_launches(entries):
    with recorded() as launches:
        route_triton.publish([tensor(60, 257, dtype=torch.int32), tensor(60, 257)], entries=entries)
    return launches


def require_lean(made, *, registers, target):
    assert 0 == made.count(r"(LDL|STL)\b.*")
    assert registers >= made.registers
    assert SHARED_LIMITS[target] >= made.shared


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_weights_are_loaded_in_16_byte_pieces_and_nothing_spills(dtype, num_tokens, target):
    rows = layer(*(DEEPSEEK if dtype == FP8 else QWEN), dtype=dtype)
    up, down, _ = expert_launches(rows, num_tokens=num_tokens)
    for launch in (up, down):
        made = compiled(launch, target=target)
        print(launch.name, target, made)
        require_lean(made, registers=255, target=target)
