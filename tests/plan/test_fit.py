"""What fits, what the host holds, and which number binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotsplit.errors import ConfigError
from hotsplit.plan.fit import Load, Machine, fit, host_bytes, kv_token_range, kv_tokens, kv_tokens_per_gib
from hotsplit.plan.kv import kv_cache
from hotsplit.plan.weigh import Range, Weighed, exactly
from hotsplit.units import MIB
from model_configs import DEEPSEEK_V4, QWEN3_30B
from plan_builders import sizes_of

ROW, LAYERS, EXPERTS, TOP_K = 1000, 10, 32, 4
SIZES = sizes_of([ROW] * LAYERS, num_experts=EXPERTS, top_k=TOP_K)
CACHE = kv_cache(
    {**QWEN3_30B, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 1}, tp=1
)  # 4 bytes a token
MODEL = Weighed(
    source="headers",
    sizes=SIZES,
    dense=exactly(20_000),
    draft=exactly(7_000),
    kv=CACHE,
    num_heads=8,
    notices=(),
)
LOAD = Load(context=1000, concurrency=2, reserve_bytes=2_000, ram_reserve_bytes=0)


def machine(vram=200_000, *, gpus=1, ram=(10**9,), **more):
    return Machine(num_gpus=gpus, vram_bytes=vram, ram_bytes=ram, **more)


def named(found, *, binding=None):
    return [finding.name for finding in found.findings if binding is None or finding.binds == binding]


def test_the_room_is_what_reserve_dense_weights_and_cache_leave():
    found = fit(MODEL, machine=machine(), load=LOAD)
    assert (exactly(4 * 1000 * 2), exactly(200_000 - 2_000 - 20_000 - 8_000)) == (found.kv_bytes, found.room)


def test_room_pays_for_hot_rows_and_a_spare_row_per_layer():
    found = fit(MODEL, machine=machine(), load=LOAD).placement
    assert (16,) * LAYERS == found.hot_rows
    assert (LAYERS, 17 * LAYERS * ROW, 0.5) == (found.spare_rows, found.used_bytes, found.hot_share)
    static = fit(MODEL, machine=machine(), load=replace(LOAD, dynamic=False)).placement
    assert ((17,) * LAYERS, 0) == (static.hot_rows, static.spare_rows)


def test_a_token_of_uniform_traffic_reads_its_part_of_the_cold_rows():
    found = fit(MODEL, machine=machine(), load=LOAD).placement
    assert LAYERS * TOP_K * ROW // 2 == found.token_cold_bytes


def test_draft_layers_take_room_only_where_they_are_loaded():
    without, loaded = (fit(MODEL, machine=machine(), load=replace(LOAD, has_draft=draft)) for draft in (False, True))
    assert 7_000 == without.room.most - loaded.room.most


def test_the_host_holds_the_cold_rows_of_every_rank_on_its_node():
    machines = machine(gpus=4, nodes=(0, 0, 0, 1))
    placement = fit(MODEL, machine=machines, load=LOAD).placement
    assert 16 * LAYERS * ROW == placement.cold_bytes
    assert {0: 3 * placement.cold_bytes, 1: placement.cold_bytes} == host_bytes(placement, machine=machines)
    assert {None: 4 * placement.cold_bytes} == host_bytes(placement, machine=machine(gpus=4))


def test_too_little_gpu_memory_binds_with_what_it_lacks_and_the_tokens_that_would_fit():
    # the fewest rows: 5 per layer, 50,000; 30,000 are taken by the rest
    found = fit(MODEL, machine=machine(vram=79_000), load=LOAD)
    assert (None, False, ["vram"]) == (found.placement, found.fits, named(found, binding=True))
    text = found.findings[0].text
    assert "at most 1,750 tokens of KV cache in all (asked: 2,000)" in text
    assert "HOTSPLIT_DYNAMIC=0" in text
    assert fit(MODEL, machine=machine(vram=80_000), load=LOAD).placement is not None


def test_the_tokens_that_a_refusal_names_do_fit():
    least = kv_tokens(MODEL, machine=machine(vram=79_000), load=LOAD)
    assert 1_750 == least
    for tokens, fits in ((least, True), (least + 1, False)):
        found = fit(MODEL, machine=machine(vram=79_000), load=replace(LOAD, context=tokens, concurrency=1))
        assert fits == (found.placement is not None)


def test_too_little_host_memory_binds_with_what_it_lacks_and_the_ways_out():
    found = fit(MODEL, machine=machine(ram=(159_000,), gpus=1), load=LOAD)
    assert (False, ["ram"]) == (found.fits, named(found, binding=True))
    assert "250 tokens of KV cache fewer" in found.findings[0].text
    assert fit(MODEL, machine=machine(ram=(160_000,)), load=LOAD).fits


def test_the_reserve_of_the_host_is_kept():
    assert not fit(MODEL, machine=machine(ram=(160_000,)), load=replace(LOAD, ram_reserve_bytes=1)).fits


def test_one_numa_node_can_bind_where_the_machine_as_a_whole_does_not():
    found = fit(MODEL, machine=machine(gpus=4, ram=(400_000, 400_000), nodes=(0, 0, 0, 1)), load=LOAD)
    assert "memory of NUMA node 0 binds" in found.findings[0].text
    assert fit(MODEL, machine=machine(gpus=4, ram=(400_000, 400_000), nodes=(0, 0, 1, 1)), load=LOAD).fits


def test_a_model_that_fits_whole_is_said_to_need_no_splitting():
    found = fit(MODEL, machine=machine(vram=400_000), load=LOAD)
    assert (True, ["fits-whole"], 0, 0) == (
        found.fits,
        named(found),
        found.placement.cold_bytes,
        found.placement.spare_rows,
    )


def test_heads_that_ranks_cannot_share_out_bind():
    assert ["heads"] == named(fit(MODEL, machine=machine(gpus=3), load=LOAD), binding=True)


def test_dense_bytes_without_an_upper_end_leave_it_open():
    found = fit(replace(MODEL, dense=Range(least=0, most=None)), machine=machine(), load=LOAD)
    assert (None, None) == (found.sure, found.fits)
    assert (18,) * LAYERS == found.best.hot_rows


def test_a_range_of_dense_bytes_is_a_range_of_hot_rows():
    found = fit(replace(MODEL, dense=Range(least=20_000, most=50_000)), machine=machine(), load=LOAD)
    assert ((13,) * LAYERS, (16,) * LAYERS, True) == (found.sure.hot_rows, found.best.hot_rows, found.fits)


def test_where_only_the_lower_end_of_a_range_fits_it_says_so():
    found = fit(replace(MODEL, dense=Range(least=20_000, most=190_000)), machine=machine(), load=LOAD)
    assert (None, ["dense-open"]) == (found.fits, named(found))


RANGE = replace(MODEL, dense=Range(least=20_000, most=50_000))
"""16 to 19 experts of a layer are cold: 160,000 to 190,000 bytes."""


@pytest.mark.parametrize(
    ("ram", "fits", "names"),
    [(159_999, False, ["ram"]), (160_000, None, ["ram-open"]), (189_999, None, ["ram-open"]), (190_000, True, [])],
)
def test_a_host_that_suffices_at_one_end_of_a_range_alone_leaves_it_open(ram, fits, names):
    found = fit(RANGE, machine=machine(ram=(ram,)), load=LOAD)
    assert (fits, names) == (found.fits, named(found))


def test_a_host_that_leaves_it_open_names_both_ends_of_its_tightest_node():
    # 34 rows of a layer and the cache: all are hot, or 30 and a spare one
    big = replace(MODEL, sizes=sizes_of([MIB] * LAYERS, num_experts=EXPERTS, top_k=TOP_K))
    big = replace(big, dense=Range(least=0, most=30 * MIB))
    machines = machine(vram=340 * MIB + 10_000, gpus=4, ram=(500 * MIB, 16 * MIB), nodes=(0, 0, 0, 1))
    found = fit(big, machine=machines, load=LOAD)
    assert (None, ["ram-open"]) == (found.fits, named(found))
    assert "whether memory of NUMA node 1 suffices" in found.findings[0].text
    assert "cold experts take 0.0 MiB to 20.0 MiB, and there is 16.0 MiB" in found.findings[0].text
    assert "4.0 MiB more" in found.findings[0].text


def test_a_cache_that_is_unknown_leaves_it_open_and_says_why():
    found = fit(replace(MODEL, kv=kv_cache(DEEPSEEK_V4, tp=1)), machine=machine(), load=LOAD)
    assert (None, None) == (found.fits, found.kv_bytes.most)
    assert "kv-unknown" in named(found)
    assert kv_tokens_per_gib(replace(MODEL, kv=kv_cache(DEEPSEEK_V4, tp=1))) is None


def test_what_a_gib_of_hot_rows_costs_in_tokens():
    assert 2**30 // 4 == kv_tokens_per_gib(MODEL)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"nodes": (0, 1)}, "got 2 nodes; wanted one for each of 4 GPUs"),
        ({"ram": (1, 2)}, "memory of 2 NUMA nodes"),
        ({"ram": (1, 2), "nodes": (0, 1, 2, 2)}, "a node below that"),
    ],
)
def test_nodes_that_do_not_match_the_machine_are_refused(more, match):
    with pytest.raises(ConfigError, match=match):
        machine(gpus=4, **more)


@given(st.integers(0, 500_000), st.integers(0, 500_000), st.integers(1, 5000))
def test_more_memory_or_a_shorter_context_never_fits_less(one, two, context):
    small, large = sorted((one, two))
    load = replace(LOAD, context=context)
    less, more = (fit(MODEL, machine=machine(vram=vram), load=load).placement for vram in (small, large))
    shorter = fit(MODEL, machine=machine(vram=small), load=replace(load, context=max(context // 2, 1))).placement
    for better in (more, shorter):
        assert less is None or better.hot_share >= less.hot_share


def test_a_host_below_its_reserve_does_not_bind_where_nothing_is_cold():
    found = fit(MODEL, machine=machine(vram=400_000, ram=(4,)), load=replace(LOAD, ram_reserve_bytes=8))
    assert (True, ["fits-whole"]) == (found.fits, named(found))


def test_a_host_below_its_reserve_is_told_so_and_not_offered_what_hot_rows_cannot_cure():
    found = fit(MODEL, machine=machine(ram=(4,)), load=replace(LOAD, ram_reserve_bytes=8))
    assert ["ram"] == named(found, binding=True)
    text = found.findings[0].text
    assert "--ram-reserve-gib" in text
    assert "more per GPU for hot rows" not in text
    assert "--ram-reserve-gib" not in fit(MODEL, machine=machine(ram=(159_000,)), load=LOAD).findings[0].text


def test_a_range_of_dense_bytes_is_a_range_of_cache_tokens():
    def tokens(most):
        dense = Range(least=20_000, most=most)
        return kv_token_range(replace(MODEL, dense=dense), machine=machine(vram=79_000), load=LOAD)

    assert [exactly(1_750), Range(least=1_500, most=1_750), Range(least=0, most=1_750)] == [
        tokens(most) for most in (20_000, 21_000, None)
    ]
