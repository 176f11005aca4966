"""Without a GPU or a driver: what the kernels become on each target, from the launches that a model would make.

A spill or a narrow load makes a kernel several times slower and changes no result, so only the code tells.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

import triton

from bank.compiled import SHARED_LIMITS, TARGETS, compiled, recorded, specialised
from hotsplit.bank.kernels import route_triton, rows_triton
from hotsplit.bank.kernels.reference import FP8, ExpertRows, LayerCounters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process, it does not compile"),
]

TOP_K = 8
DEEPSEEK = (257, 7168, 2048)
QWEN = (129, 2048, 768)
GPT_OSS = (33, 2880, 2880)
ODD = (33, 2880, 1408)
"""R, D, I; of ODD neither D nor I is a multiple of every tile, and D is none of 128."""


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


def require_lean(launch, *, target, registers=255):
    """Compile; nothing spills, and a program fits into what the target has."""
    made = compiled(launch, target=target)
    assert 0 == made.count(r"(LDL|STL)\b.*")
    assert registers >= made.registers
    assert SHARED_LIMITS[target] >= made.shared
    return made


def require_wide(launch, *, target, has_bias=False):
    """Compile; a tile of weights is loaded by 16-byte pieces, and nothing is narrow, unless it is a bias."""
    made = require_lean(launch, target=target)
    weight, constants = launch.arguments[2], launch.keywords
    tile_bytes = constants["BLOCK_N"] * constants["BLOCK_K"] * weight.itemsize
    assert tile_bytes // (constants["num_warps"] * 32 * 16) <= made.count(r"(LDG|LDGSTS)\.E\S*\.128")
    assert has_bias or 0 == made.count(rf"(LDG|LDGSTS)\.E\S*\.[US]{8 * weight.itemsize}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_weights_are_loaded_in_16_byte_pieces_and_nothing_spills(dtype, num_tokens, target):
    up, down, _ = expert_launches(layer(*(DEEPSEEK if dtype == FP8 else QWEN), dtype=dtype), num_tokens=num_tokens)
    require_wide(up, target=target)
    require_wide(down, target=target)


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_sizes_that_are_no_multiples_of_a_tile_load_as_wide(num_tokens):
    up, down, _ = expert_launches(layer(*ODD, dtype=torch.bfloat16), num_tokens=num_tokens)
    require_wide(up, target=90)
    require_wide(down, target=90)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_floats_load_as_wide(dtype):
    for num_tokens in (1, 64):
        up, _, _ = expert_launches(layer(*QWEN, dtype=dtype), num_tokens=num_tokens, dtype=dtype)
        require_wide(up, target=120)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_biases_and_other_activations_do_not_spill(activation):
    num_rows, hidden_dim, inner_dim = QWEN
    biases = {
        "up_bias": tensor(num_rows, 2 * inner_dim, dtype=torch.bfloat16),
        "down_bias": tensor(num_rows, hidden_dim, dtype=torch.bfloat16),
    }
    up, _, _ = expert_launches(layer(*QWEN, dtype=torch.bfloat16, activation=activation, **biases), num_tokens=64)
    require_lean(up, target=90)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_a_gate_with_a_limit_and_biases_loads_as_wide_and_does_not_spill(num_tokens, target):
    num_rows, hidden_dim, inner_dim = GPT_OSS
    biases = {
        "up_bias": tensor(num_rows, 2 * inner_dim, dtype=torch.bfloat16),
        "down_bias": tensor(num_rows, hidden_dim, dtype=torch.bfloat16),
    }
    gate = {"gate_limit": 7.0, "gate_slope": 1.702, "gate_shift": 1.0}
    up, down, _ = expert_launches(layer(*GPT_OSS, dtype=torch.bfloat16, **biases, **gate), num_tokens=num_tokens)
    require_wide(up, target=target, has_bias=True)
    require_wide(down, target=target, has_bias=True)


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_limit_of_float8_rows_does_not_spill(num_tokens):
    up, _, _ = expert_launches(layer(*DEEPSEEK, dtype=FP8, gate_limit=10.0), num_tokens=num_tokens)
    require_wide(up, target=90)


@pytest.mark.parametrize("target", TARGETS)
def test_the_sum_over_places_loads_16_bytes_at_once(target):
    *_, combine = expert_launches(layer(*QWEN, dtype=torch.bfloat16), num_tokens=4)
    assert TOP_K <= require_lean(combine, target=target, registers=96).count(r"LDG\.E\S*\.128")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("padding", ["none", "kept", "redirected"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_route_kernel_is_small(dtype, padding, target):
    made = require_lean(route_launch(dtype=dtype, padding=padding), target=target, registers=48)
    assert 600 >= made.instructions.total()
    assert 1024 >= made.shared


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", route_triton.PUBLISH_SIZES)
def test_a_publish_reads_no_memory_and_writes_every_entry_once_per_map(count, target):
    (launch,) = publish_launches([(i % 60, i, i) for i in range(count)])
    made = require_lean(launch, target=target, registers=48)
    assert (0, 2 * count) == (made.count(r"LD[GS]?\b.*|LDGSTS.*"), made.count(r"STG.*"))


def test_beginning_a_step_reads_no_memory():
    with recorded() as launches:
        route_triton.begin_step(tensor(2), number=1, phase=0)
    made = require_lean(launches[0], target=90, registers=16)
    assert (0, True) == (made.count(r"LDG.*"), made.count(r"STG.*") > 0)


def types_and_constants(launch):
    """What decides whether a launch needs a compilation of its own."""
    options, *found = specialised(launch, target=90)
    return options.__dict__, found


def test_one_compilation_routes_every_layer_and_every_number_of_tokens():
    usual = types_and_constants(route_launch())
    assert usual == types_and_constants(route_launch(num_tokens=1, first_cold=1))
    assert usual == types_and_constants(route_launch(num_tokens=4096, num_experts=128, first_cold=16))


@pytest.mark.parametrize("size", route_triton.PUBLISH_SIZES)
def test_one_compilation_publishes_any_entries(size):
    (first,) = publish_launches([(0, 0, 0)] * size)
    (second,) = publish_launches([(59, i, 16 * i) for i in range(size - 3)])
    assert types_and_constants(first) == types_and_constants(second)
    assert len(first.arguments[2]) == size


def test_one_compilation_begins_any_step():
    with recorded() as launches:
        for number, phase in ((1, 0), (16, 1), (2**40, -1)):
            route_triton.begin_step(tensor(2), number=number, phase=phase)
    first, *others = map(types_and_constants, launches)
    assert [first, first] == others


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_one_compilation_serves_layers_with_other_numbers_of_hot_rows(num_tokens):
    launches = []
    for first_cold in (1, 16, 100):
        rows = dataclasses.replace(layer(*QWEN, dtype=torch.bfloat16), first_cold=first_cold)
        launches.append([*map(types_and_constants, expert_launches(rows, num_tokens=num_tokens))])
    assert launches[0] == launches[1] == launches[2]


def test_tensors_over_more_than_2_gib_are_addressed_in_64_bits():
    up, _, _ = expert_launches(layer(*DEEPSEEK, dtype=FP8), num_tokens=1)
    stride = up.arguments[2].stride(0)
    assert 2**31 < 256 * stride  # so that a product of 32 bits would wrap
    _, _, _, hints = specialised(up, target=90)
    position = up.kernel.arg_names.index("row_stride")
    assert [["tt.divisibility", 16]] == hints[(position,)]
