from __future__ import annotations

import functools
import json
import re
import types
from pathlib import Path

import pytest

from hotsplit.engines.vllm.tuned import redirect, use_stock_counts

# -- without vLLM


def module_with(**functions):
    module = types.ModuleType("fused_moe")
    vars(module).update(functions)
    return module


def lookups():
    """A module whose functions are built as vLLM's are: they reach each other through its globals."""
    module = types.ModuleType("fused_moe")
    source = """
import functools
def get_config_file_name(E, N, dtype=None): return f"E={E},N={N}.json"
def get_default_config(M, E, N): return {"E": E, "M": M}
def should_moe_wna16_use_cuda(num_valid_tokens, num_experts): return num_valid_tokens / num_experts <= 6
@functools.lru_cache
def get_moe_configs(E, N): return get_config_file_name(E, N)
"""
    exec(source, vars(module))
    return module


def test_the_row_count_becomes_the_stock_count_by_position_and_by_name():
    module = lookups()
    assert [] == redirect(module, rows_to_experts={129: 128})
    assert "E=128,N=7.json" == module.get_config_file_name(129, 7)
    assert "E=128,N=7.json" == module.get_config_file_name(N=7, E=129)
    assert {"E": 128, "M": 129} == module.get_default_config(129, 129, 7)
    assert {"E": 128, "M": 5} == module.get_default_config(5, N=7, E=129)
    assert not module.should_moe_wna16_use_cuda(num_valid_tokens=773, num_experts=129)


def test_other_counts_are_left_as_they_are():
    module = lookups()
    redirect(module, rows_to_experts={129: 128})
    assert "E=130,N=7.json" == module.get_config_file_name(130, 7)


def test_a_count_is_translated_once_even_where_its_translation_is_in_the_table():
    module = lookups()
    redirect(module, rows_to_experts={129: 128, 128: 127})
    assert "E=128,N=7.json" == module.get_config_file_name(129, 7)


def test_calling_it_again_adds_to_the_table_and_wraps_nothing_twice():
    module = lookups()
    redirect(module, rows_to_experts={129: 128})
    wrapped = module.get_config_file_name, module.get_default_config
    redirect(module, rows_to_experts={65: 64})
    assert wrapped == (module.get_config_file_name, module.get_default_config)
    assert ["E=128,N=7.json", "E=64,N=7.json"] == [module.get_config_file_name(rows, 7) for rows in (129, 65)]


def test_what_was_looked_up_before_is_forgotten():
    module = lookups()
    assert "E=129,N=7.json" == module.get_moe_configs(129, 7)
    redirect(module, rows_to_experts={129: 128})
    assert "E=128,N=7.json" == module.get_moe_configs(129, 7)


def test_two_numbers_of_experts_with_the_same_rows_are_told_and_the_first_stays():
    module = lookups()
    redirect(module, rows_to_experts={129: 128})
    (notice,) = redirect(module, rows_to_experts={129: 129, 65: 64})
    assert "layers of 129 and of 128 experts both have 129 rows" in notice.text
    assert ["E=128,N=7.json", "E=64,N=7.json"] == [module.get_config_file_name(rows, 7) for rows in (129, 65)]


def test_the_same_number_again_is_no_conflict():
    module = lookups()
    assert [] == redirect(module, rows_to_experts={129: 128})
    assert [] == redirect(module, rows_to_experts={129: 128})


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"get_config_file_name": lambda E, N: ""},
        {
            "get_config_file_name": lambda E, N: "",
            "get_default_config": lambda M, num_experts: {},
            "should_moe_wna16_use_cuda": lambda num_experts: True,
        },
    ],
    ids=["none", "one", "another parameter"],
)
def test_a_release_without_the_lookups_is_told_and_left_alone(functions):
    module = module_with(**functions)
    (notice,) = redirect(module, rows_to_experts={129: 128})
    assert "no-tuned-configurations" == notice.name
    assert functions == {name: getattr(module, name) for name in functions}


# -- vLLM's own


@pytest.fixture
def fused_moe():
    """vLLM's module, put back afterwards."""
    module = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    before = dict(vars(module))
    module.get_moe_configs.cache_clear()
    yield module
    vars(module).clear()
    vars(module).update(before)
    module.get_moe_configs.cache_clear()


@pytest.fixture
def asked(fused_moe, monkeypatch):
    """Names of the configuration files that were looked for."""
    names = []
    exists = fused_moe.os.path.exists
    path = types.SimpleNamespace(**vars(fused_moe.os.path))
    path.exists = lambda name: (names.append(path.basename(name)), exists(name))[1]
    monkeypatch.setattr(fused_moe, "os", types.SimpleNamespace(path=path))
    return names


def tiles_of(module, *, rows, num_tokens=64, dtype=None):
    """What a kernel asks for: it knows its weights' shapes alone."""
    w13_shape, w2_shape = (rows, 2 * 768, 2048), (rows, 2048, 768)
    return module.try_get_optimal_moe_config(w13_shape, w2_shape, 8, dtype, num_tokens)


@pytest.mark.vllm
def test_vllm_asks_for_the_file_of_128_experts_though_there_are_129_rows(fused_moe, asked):
    use_stock_counts({129: 128})
    tiles_of(fused_moe, rows=129)
    assert ["E=128,N=768"] == [name.split(",device")[0] for name in asked]


@pytest.mark.vllm
def test_without_it_vllm_asks_for_129(fused_moe, asked):
    tiles_of(fused_moe, rows=129)
    assert ["E=129,N=768"] == [name.split(",device")[0] for name in asked]


@pytest.mark.vllm
def test_the_file_asked_for_is_that_of_stock_to_the_letter(fused_moe, asked):
    tiles_of(fused_moe, rows=128, dtype="fp8_w8a8")
    fused_moe.get_moe_configs.cache_clear()
    use_stock_counts({129: 128})
    tiles_of(fused_moe, rows=129, dtype="fp8_w8a8")
    assert asked[0] == asked[1]
    assert 2 == len(asked)


@pytest.mark.vllm
def test_a_user_s_own_folder_is_looked_through_under_the_stock_count(fused_moe, monkeypatch, tmp_path):
    tiles = {"BLOCK_SIZE_M": 48, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    (tmp_path / fused_moe.get_config_file_name(128, 768, None)).write_text(json.dumps({"64": tiles}))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert tiles != tiles_of(fused_moe, rows=129)
    use_stock_counts({129: 128})
    assert tiles == tiles_of(fused_moe, rows=129)


@pytest.mark.vllm
def test_a_tuned_file_that_ships_with_vllm_is_found(fused_moe, monkeypatch):
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H200")
    stock = tiles_of(fused_moe, rows=128)
    assert stock != tiles_of(fused_moe, rows=129)
    use_stock_counts({129: 128})
    assert stock == tiles_of(fused_moe, rows=129)


@pytest.mark.vllm
def test_guessed_tiles_are_those_of_the_stock_count(fused_moe):
    many = functools.partial(fused_moe.get_default_config, 129 * 128, N=768, K=2048, topk=8, dtype=None)
    stock, own = many(E=128), many(E=129)
    assert stock != own
    use_stock_counts({129: 128})
    assert stock == fused_moe.get_default_config(129 * 128, 129, 768, 2048, 8, None)


@pytest.mark.vllm
def test_tiles_and_kernel_of_4_bit_weights_are_chosen_by_the_same_count(fused_moe, monkeypatch):
    monkeypatch.setattr(fused_moe, "current_platform", types.SimpleNamespace(is_cuda=lambda: True))
    chosen = functools.partial(fused_moe.should_moe_wna16_use_cuda, num_valid_tokens=773, group_size=64, bit=4)
    assert (False, True) == (chosen(num_experts=128), chosen(num_experts=129))
    use_stock_counts({129: 128})
    assert not fused_moe.should_moe_wna16_use_cuda(num_valid_tokens=773, group_size=64, num_experts=129, bit=4)


@pytest.mark.vllm
def test_every_kernel_of_vllm_reaches_the_lookups_through_their_module(fused_moe):
    """A copy of a lookup in another module's globals would not be redirected."""
    package = Path(fused_moe.__file__).parents[3]
    lookups = "get_config_file_name|get_default_config|get_moe_configs|should_moe_wna16_use_cuda"
    named = re.compile(rf"^[^#\n]*\b({lookups})\b", re.MULTILINE)
    users = {path for path in package.rglob("*.py") if named.search(path.read_text(encoding="utf-8"))}
    # The package offers one name to benchmark scripts; no kernel takes it from there.
    assert {"fused_moe/fused_moe.py", "fused_moe/__init__.py"} == {"/".join(path.parts[-2:]) for path in users}
