"""A layer in two banks: its kernel is called once for the hot rows and once for the cold ones, and the results are summed.

The fallback for GPUs that cannot have both memories at one address (bank/two_banks.py), behind weights.py and
experts.py. While a layer is loaded its big tensors lie in plain host memory, a stage, so that every loader finds one
writable tensor of R rows; after post-processing their rows go into the banks and the stage is given back:

    staged()       pages that cost nothing until they are written to; all stages together hold all experts, once
    split_banks()  one layer, on the device: hot rows to the hot bank, cold rows to the cold one, a view for each
    TwoCalls       what stands for the stock forward of the layer from then on

Each pair of a token and an expert is computed by one call and left out by the other, which an expert map tells them. So
the kernel must honour one: selftest.py proves it, and require_expert_map() asks vLLM's own word first. Row ids, maps and
shapes are the same in every step; nothing is asked of the host, and a graph can capture both calls.

Shapes: T tokens, K top-k, D model dim, R rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.row_memory import bytes_per_row
from hotsplit.bank.rows import LayerRows
from hotsplit.engines.vllm.bank_views import BankTensors, bank_view, expert_map, held_by, turned
from hotsplit.errors import BankError, UnsupportedEngineError
from hotsplit.host.libc import MAP_NORESERVE
from hotsplit.units import gib

_BANKS = ("hot", "cold")
_HOST_RESIDENT = "_vllm_is_uva_offloaded"
"""vLLM's mark of weights that a GPU reads from the host: its kernels read such an expert once, not once for each token."""


def staged(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    """Host memory for a tensor that is being loaded: zeros, whose pages exist once they are written to.

    Args:
        shape: Of the tensor.
        dtype: Of its elements.

    Returns:
        A tensor of the CPU; its last reference gives the memory back to the kernel, whatever its size.

    Raises:
        BankError: The kernel has no addresses left.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        pages = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, ValueError) as error:
        do = "look at ulimit -v and vm.max_map_count"
        raise BankError("host memory to load experts into", got=str(error), wanted=gib(num_bytes), do=do) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class TwoCalls:
    """What stands for the stock forward of a layer in two banks.

    Args:
        views: The layer as each bank that has rows sees it, hot rows first.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self.views = tuple(views)
        """One or two modules of vLLM."""

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, row_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The layer's output, [T, D].

        Args:
            x: Tokens, [T, D].
            topk_weights: Router weights, [T, K].
            row_ids: Row ids of the layer, [T, K].
            *args: Shared experts and their input, for one call alone: they are computed once.
            **kwargs: The same by name.
        """
        first, *others = self.views
        output: torch.Tensor = first.forward_rows(x, topk_weights, row_ids, *args, **kwargs)
        for view in others:
            output = output + view.forward_rows(x, topk_weights, row_ids)
        return output


def require_expert_map(module: Any) -> None:
    """Refuse a kernel that says itself that it takes no expert map.

    Args:
        module: vLLM's experts module, post-processed.

    Raises:
        UnsupportedEngineError: It does.
    """
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    declared = getattr(experts, "supports_expert_map", None)
    if declared is not None and not declared():
        raise no_expert_map(module, got=f"{type(experts).__name__}, which supports no expert map")


def no_expert_map(module: Any, *, got: str) -> UnsupportedEngineError:
    """The refusal of a kernel that cannot be called for each bank.

    Args:
        module: vLLM's experts module.
        got: What it does instead.
    """
    return UnsupportedEngineError(
        f"{module.layer_name}: two banks with {type(module.quant_method).__name__}",
        got=got,
        wanted="a kernel that honours an expert map: this GPU cannot have hot and cold rows at one address",
        do="choose another one with --moe-backend (triton, cutlass or marlin, as the format allows), update the driver "
        "(in a container add --cap-add SYS_NICE), or unset the HOTSPLIT_ variables",
    )


def trial_calls(module: Any, *, rows: LayerRows) -> TwoCalls:
    """Two calls over the plain tensors of a layer, to see whether its kernel honours an expert map.

    Both get all R rows, the second ones with the cold rows first: a kernel that ignores the map computes nonsense here,
    and reads nothing outside of its tensors.

    Args:
        module: vLLM's experts module, post-processed, with rows in both banks.
        rows: Where every expert lies.
    """
    num_rows, first_cold = rows.num_rows, rows.first_cold
    device = next(module.parameters()).device
    views = []
    for first, past, replace in (
        (0, first_cold, lambda tensor: tensor),
        (first_cold, num_rows, lambda tensor: turned(tensor, first=first_cold)),
    ):
        map_R = expert_map(first, past, num_rows=num_rows, device=device)
        views.append(bank_view(module, replace=replace, num_rows=num_rows, num_local=num_rows, map_R=map_R))
    return TwoCalls(views)


def split_banks(
    module: Any,
    *,
    memory: RangeRows,
    layer_id: int,
    rows: LayerRows,
    moving: Sequence[torch.Tensor],
    is_split: Callable[[int], bool],
) -> TwoCalls:
    """Put the rows of a post-processed layer into the banks, and take its plain tensors away.

    Args:
        module: vLLM's experts module; its tensors of R rows lie on the device. It keeps the small ones, and the parts of
            the big ones under names of their own.
        memory: Two banks; told what a row is made of.
        layer_id: Ordinal among MoE layers.
        rows: Where every expert lies.
        moving: Tensors of R rows that move with a row.
        is_split: Whether rows of so many bytes go into the banks; those of other tensors stay on the device.

    Raises:
        BankError: Memory does not suffice, or rows of a tensor do not lie one behind the other.
    """
    num_rows = rows.num_rows
    wholes = {one.data_ptr(): one for one in moving if is_split(bytes_per_row(one.shape, dtype=one.dtype))}
    parts = {at: _filled_parts(memory, layer_id, _row_bytes(whole)) for at, whole in wholes.items()}
    edges = (0, rows.first_cold, num_rows)
    views: dict[str, Any] = {}
    for number, name in enumerate(_BANKS):
        first, past = edges[number], edges[number + 1]
        if first < past:
            apart = [(_row_bytes(wholes[at]), both[number]) for at, both in parts.items()]
            is_all = past - first == num_rows
            device = next(module.parameters()).device
            views[name] = bank_view(
                module,
                replace=BankTensors(first, past, apart=apart),
                num_rows=num_rows,
                num_local=past - first,
                map_R=None if is_all else expert_map(first, past, num_rows=num_rows, device=device),
            )
    memory.register(layer_id, [parts.get(one.data_ptr(), one) for one in moving])
    _strip(module, views=views, addresses=set(wholes), num_rows=num_rows)
    return TwoCalls(tuple(views.values()))


def _row_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view as [R, row bytes], uint8."""
    return tensor.data.view(len(tensor), -1).view(torch.uint8)


def _filled_parts(memory: RangeRows, layer_id: int, whole_RB: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both banks' parts of a tensor, [rows, row bytes], with its bytes."""
    parts = memory.allocate_parts(layer_id, shape=tuple(whole_RB.shape), dtype=torch.uint8)
    source = whole_RB.data_ptr()
    for part in parts:
        if part.numel():
            # By the driver, as rows are moved: torch would take host memory that is mapped for the device's own.
            memory.memory.copy([(part.data_ptr(), source)], num_bytes=part.nbytes)
        source += part.nbytes
    return parts


def _strip(module: Any, *, views: dict[str, Any], addresses: set[int], num_rows: int) -> None:
    """Leave nothing on the layer that would keep the plain tensors alive, or that a stock call would take for all rows."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.data_ptr() not in addresses or not parameter.numel():
            continue
        delattr(module, name)
        for bank, view in views.items():
            part = getattr(view, name)
            if bank == "cold":
                setattr(part, _HOST_RESIDENT, True)
            module.register_parameter(f"{name}_{bank}", part)
    method = module.quant_method
    if held := held_by(method, num_rows=num_rows):
        module.quant_method = next(iter(views.values())).quant_method
        for name in held:
            object.__setattr__(method, name, None)
