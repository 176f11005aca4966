"""Kernel configurations are looked up under the stock number of experts.

vLLM finds the tile sizes of its Triton MoE kernels in a file named after E, which it takes from the weight's shape. A
layer of 128 experts with a spare row has 129 rows: there is no file for 129, and the kernel would run slower on guessed
tiles. So the functions that are given an E get the stock one; every caller reaches them through their module's globals.

    w2 [129, D, F] -> try_get_optimal_moe_config -> get_moe_configs(129, ..) -> get_config_file_name(129) -> "E=128,..."
                                                 -> get_default_config(M, 129, ..)                 -> as for 128
    B  [129, ..]   -> dispatch_fused_moe_kernel  -> should_moe_wna16_use_cuda(.., 129, ..)         -> as for 128

The last one must agree with the second: both choose between the CUDA and the Triton kernel of 4-bit weights, and tiles
made for one must not reach the other.

What is not reached, and keeps the row count: kernels that work out their tiles elsewhere from the number of experts
(Marlin, humming, FlyDSL, AITER, the TRT-LLM kernels), and the Triton path's own choice for batches of a few tokens,
which is the same for E and E + 1 where 4 divides E.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from hotsplit.bank.range_rows import RangeRows
from hotsplit.notices import Notice

_TABLE: Final = "_hotsplit_stock_counts"
"""Global of vLLM's module: rows -> experts. Its presence says that the functions there are wrapped."""
_HOST_RESIDENT: Final = "_vllm_is_uva_offloaded"
"""vLLM's mark of a parameter that lies in host memory; 0.33 chooses its small-batch path by it."""
_LOOKUPS: Final = {
    "get_config_file_name": "E",
    "get_default_config": "E",
    "should_moe_wna16_use_cuda": "num_experts",
}
"""Function -> its parameter for the number of experts."""


def use_stock_counts(rows_to_experts: Mapping[int, int]) -> list[Notice]:
    """Look tuned configurations up under the stock number of experts from now on, in this process.

    Calling it again adds to what is known; the functions are wrapped once.

    Args:
        rows_to_experts: Rows of a layer's weights to what vLLM would have had in their place.

    Returns:
        A notice where this cannot be done: the run is right all the same, on tiles that may be slower.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe

    return redirect(fused_moe, rows_to_experts=rows_to_experts)


def redirect(module: ModuleType, *, rows_to_experts: Mapping[int, int]) -> list[Notice]:
    """The same for a given module.

    Args:
        module: With the functions of vLLM's fused_moe.
        rows_to_experts: As in use_stock_counts().
    """
    lookups = {name: getattr(module, name, None) for name in _LOOKUPS}
    missing = [name for name, lookup in lookups.items() if not lookup or _LOOKUPS[name] not in _parameters(lookup)]
    if missing:
        text = f"vLLM has no {missing[0]}({_LOOKUPS[missing[0]]}): kernel tiles are looked up under the number of rows"
        return [Notice(name="no-tuned-configurations", text=text, strict=False)]
    table: dict[int, int] | None = vars(module).get(_TABLE)
    if table is None:
        table = {}
        setattr(module, _TABLE, table)
        for name, lookup in lookups.items():
            setattr(module, name, _under_stock_count(lookup, count=_LOOKUPS[name], table=table))
    for rows, experts in rows_to_experts.items():
        table.setdefault(rows, experts)
    # What was looked up under the number of rows before is remembered there.
    forget = getattr(getattr(module, "get_moe_configs", None), "cache_clear", None)
    if forget is not None:
        forget()
    return [
        Notice(
            name="unclear-tuned-configurations",
            text=f"layers of {experts} and of {table[rows]} experts both have {rows} rows: their kernel configurations "
            f"are looked up under {table[rows]}",
            strict=False,
        )
        for rows, experts in rows_to_experts.items()
        if experts != table[rows]
    ]


def mark_cold_weights(modules: Sequence[Any], *, memory: RangeRows) -> None:
    """Let kernels know of weights that a GPU reads from the host in part: read an expert once, not once for each token.

    vLLM's mark for weights that its own offloader has moved. For a few tokens its Triton kernel would read an expert
    anew for every token that chose it, and over a link that is what time goes to. The mark does not follow single rows,
    so that no placement and no swap changes which path runs.

    Args:
        modules: vLLM's experts modules, loaded.
        memory: Their rows.
    """
    if not memory.memory.copies_rows_alone or not memory.host_bytes:
        return
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if memory.owns(parameter.data):
                setattr(parameter, _HOST_RESIDENT, True)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _under_stock_count(lookup: Any, *, count: str, table: Mapping[int, int]) -> Callable[..., Any]:
    """The function with its number of experts translated. It runs at every step without CUDA graphs: no binding."""
    position = _parameters(lookup).index(count)

    @functools.wraps(lookup)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if count in kwargs:
            kwargs[count] = table.get(kwargs[count], kwargs[count])
        elif len(args) > position:
            args = (*args[:position], table.get(args[position], args[position]), *args[position + 1 :])
        return lookup(*args, **kwargs)

    return wrapped
