"""One layer's weights: born in ranges, loaded into planned rows, post-processed, put back, and proven to be movable.

    create_weights -> views of ranges -> loader writes planned rows -> post-processing -> back, row by row -> registered
                      or of a stage,                                                   -> into two banks, where there are

Shapes: E experts, R rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.rows import LayerRows
from hotsplit.engines.vllm.into_ranges import IntoRanges
from hotsplit.engines.vllm.selftest import Prover
from hotsplit.engines.vllm.two_calls import require_expert_map, split_banks, staged
from hotsplit.errors import EngineError, UnsupportedEngineError
from hotsplit.host.progress import LoadWatch

logger = logging.getLogger(__name__)

_STOCK_CLASS = "RoutedExperts"
"""The class of vLLM whose weight_loader asks for the row of every expert."""
_WHOLE_TENSOR_FORMATS = frozenset({"gpt_oss_mxfp4"})
"""Quantisations whose stock loader copies all experts at once and never asks for a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A layer that hotsplit serves."""

    layer_id: int
    """Ordinal among the MoE layers of this rank."""
    name: str
    """Module path."""
    rows: LayerRows
    """Where every expert starts."""
    memory: RangeRows
    """Of all layers."""
    row_bytes: int
    """Bytes of one expert, as the checkpoint's headers tell."""
    watch: LoadWatch
    """Told what has been read."""
    prover: Prover
    """Proves that rows may move."""

    @property
    def num_experts(self) -> int:
        """Routed experts, E."""
        return len(self.rows.row_map)

    @property
    def num_rows(self) -> int:
        """Rows, R."""
        return self.rows.num_rows

    @property
    def num_extra(self) -> int:
        """Rows beyond the engine's own number of experts: 1 for a spare row, else 0."""
        return self.num_rows - self.num_experts - self.rows.num_fixed


class LayerWeights:
    """The weights of one layer on their way into the banks.

    Args:
        module: vLLM's experts module.
        claim: Which layer it is.
    """

    def __init__(self, module: Any, *, claim: Claim) -> None:
        self._module, self._claim = module, claim
        self._ranges: list[torch.Tensor] = []
        self._whole: dict[str, torch.Tensor] = {}
        self._num_loaded = [0] * claim.num_experts
        self._in_order = False

    @property
    def is_apart(self) -> bool:
        """Whether rows come to lie in two banks, so that a tensor of all rows exists only while it is loaded."""
        return self._claim.memory.memory.num_banks == 2

    @property
    def is_in_order(self) -> bool:
        """Whether the loader writes experts in their own order, because it does not ask for rows."""
        return self._in_order

    def wrap(self, method: Any) -> Any:
        """Put ranges behind a quantisation method's weights.

        Args:
            method: vLLM's, of this layer alone.
        """
        create, process = method.create_weights, method.process_weights_after_loading

        def create_weights(*args: Any, **kwargs: Any) -> None:
            self._in_order = _loads_whole_tensors(self._module)
            with IntoRanges(self.new_tensor, is_zero=self.is_apart):
                create(*args, **kwargs)
            if self._in_order:
                self._require_whole_copies()
                self._hide_last_rows()

        def process_weights_after_loading(layer: Any) -> None:
            self._finish(layer, process)

        for name, wrapped in (
            ("create_weights", create_weights),
            ("process_weights_after_loading", process_weights_after_loading),
        ):
            object.__setattr__(method, name, wrapped)  # it may be an nn.Module
        return method

    def row_to_load(self, expert_id: int) -> int:
        """Where the loader is to write an expert.

        Args:
            expert_id: Routed, or beyond: fixed rows first, then what the engine takes for a redundant expert.
        """
        claim = self._claim
        if self._in_order:
            return expert_id
        if expert_id < claim.num_experts:
            if not self._num_loaded[expert_id]:
                claim.watch.advance(claim.row_bytes)
            self._num_loaded[expert_id] += 1
            return claim.rows.row_map[expert_id]
        beyond = expert_id - claim.num_experts
        if beyond < claim.rows.num_fixed:
            return claim.rows.fixed_rows[beyond]
        if claim.rows.spare_row is None:
            raise EngineError(f"{claim.name}, expert {expert_id}", got="an expert that has no row")
        return claim.rows.spare_row

    def new_tensor(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a weight that create_weights asks for; None where it stays a plain tensor.

        Args:
            shape: Asked for.
            dtype: Asked for.
        """
        claim = self._claim
        if len(shape) < 2 or shape[0] != claim.num_rows or not self._is_split(math.prod(shape[1:]) * dtype.itemsize):
            return None
        if self.is_apart:
            tensor = staged(shape, dtype=dtype)
        else:
            tensor = claim.memory.allocate(claim.layer_id, shape=shape, dtype=dtype)
        self._ranges.append(tensor)
        return tensor

    def _is_split(self, row_bytes: int) -> bool:
        """Whether a kind of tensor goes into the mixed range: 1 % or more of an expert, in rows that can be aligned."""
        claim = self._claim
        return row_bytes * 100 >= claim.row_bytes and row_bytes % claim.memory.memory.alignment == 0

    def _finish(self, layer: Any, process: Callable[[Any], None]) -> None:
        """Everything after the last weight of the layer has been read."""
        self._require_loaded()
        if self.is_apart:
            self._finish_apart(layer, process)
        else:
            self._finish_in_place(layer, process)
        self._claim.watch.layer_done()

    def _finish_in_place(self, layer: Any, process: Callable[[Any], None]) -> None:
        """Ranges hold the rows already: post-process, and put back what came of it."""
        claim = self._claim
        memory, rows = claim.memory, claim.rows
        if self._in_order:
            self._show_all_rows()
            memory.register(claim.layer_id, list(self._moving()))
            targets = [*rows.row_map, *rows.fixed_rows]
            memory.permute(claim.layer_id, rows=targets, free_row=None)
            claim.watch.advance(claim.row_bytes * claim.num_experts)
        elif rows.spare_row is not None:
            memory.register(claim.layer_id, list(self._moving()))
        if rows.spare_row is not None:
            # Loaders leave it empty; a kernel may pack, scale or check it like any other row.
            memory.copy_row(claim.layer_id, source_row=rows.row_map[0], target_row=rows.spare_row)
        if memory.memory.copies_rows_alone:
            self._take_out()
        process(layer)
        self._put_back()
        memory.register(claim.layer_id, list(self._moving()))
        claim.prover.prove(self._module, memory=memory, layer_id=claim.layer_id, rows=rows)

    def _finish_apart(self, layer: Any, process: Callable[[Any], None]) -> None:
        """Post-process plain tensors of this layer on the device, then put their rows into the banks."""
        claim, module = self._claim, self._module
        memory, rows = claim.memory, claim.rows
        self._leave_stage()
        if self._in_order:
            claim.watch.advance(claim.row_bytes * claim.num_experts)
        process(layer)
        # Methods that make their configuration at the first step would make it of tensors that are gone by then.
        getattr(module, "_ensure_moe_quant_config_init", _nothing)()
        if 0 < rows.first_cold < rows.num_rows:  # else all rows are in one bank, and one call does
            require_expert_map(module)
            claim.prover.prove_two_calls(module, rows=rows)
        calls = split_banks(
            module,
            memory=memory,
            layer_id=claim.layer_id,
            rows=rows,
            moving=list(self._moving()),
            is_split=self._is_split,
        )
        object.__setattr__(module, "hotsplit_calls", calls)
        claim.prover.prove(module, memory=memory, layer_id=claim.layer_id, rows=rows)

    def _leave_stage(self) -> None:
        """Plain tensors on the device, every expert in its row; the stage's pages go with the last look at them."""
        rows = self._claim.rows
        if self._in_order:
            self._show_all_rows()
        self._ranges.clear()
        for parameter in self._module.parameters(recurse=False):
            if not parameter.ndim or parameter.shape[0] != rows.num_rows:
                continue
            parameter.data = parameter.data.to(self._claim.memory.memory.device_type)
            if self._in_order:
                parameter.data = _in_rows(parameter.data, targets=[*rows.row_map, *rows.fixed_rows])
            if rows.spare_row is not None:
                parameter.data[rows.spare_row].copy_(parameter.data[rows.row_map[0]])

    def _require_loaded(self) -> None:
        claim = self._claim
        missing = self._never_written() if self._in_order else [e for e, n in enumerate(self._num_loaded) if not n]
        if missing:
            raise UnsupportedEngineError(
                f"{claim.name}: the weights of {len(missing)} of {claim.num_experts} experts",
                got="a loader that goes round the row map, or a checkpoint without them",
                wanted="every expert loaded through vLLM's expert map",
                do="use safetensors and vLLM's default load format, or report this model",
                missing=missing[:8],
            )

    def _never_written(self) -> list[int]:
        """Experts that a whole-tensor loader has left as the fresh pages were: nothing but zeros."""
        experts = range(self._claim.num_experts)
        return [expert for expert in experts if not any(bool(tensor[expert].any()) for tensor in self._ranges)]

    def _hide_last_rows(self) -> None:
        """Let the parameters end where the engine's own experts do: whole-tensor loaders want exactly so many."""
        claim = self._claim
        for name, parameter in self._module.named_parameters(recurse=False):
            if parameter.ndim and parameter.shape[0] == claim.num_rows:
                self._whole[name] = parameter.data
                parameter.data = parameter.data[: claim.num_rows - claim.num_extra]

    def _show_all_rows(self) -> None:
        for name, whole in self._whole.items():
            getattr(self._module, name).data = whole
        self._whole.clear()

    def _owned(self) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
        """Every range with the parameter that shows it."""
        by_address = {parameter.data_ptr(): parameter for parameter in self._module.parameters(recurse=False)}
        yield from (
            (tensor, by_address[tensor.data_ptr()]) for tensor in self._ranges if tensor.data_ptr() in by_address
        )

    def _require_whole_copies(self) -> None:
        claim = self._claim
        if claim.memory.memory.copies_rows_alone and not self.is_apart:
            raise UnsupportedEngineError(
                f"{claim.name}: {type(self._module).__name__}",
                got="a loader that copies all experts of a tensor at once",
                wanted="one that asks for the row of every expert: no copy may span GPU and host memory",
                do="run this model without hotsplit",
            )

    def _take_out(self) -> None:
        """Let post-processing see plain tensors: it copies and fills whole ones, which must not span two memories."""
        for tensor, parameter in list(self._owned()):
            plain = torch.empty_like(tensor)
            for row in range(self._claim.num_rows):
                plain[row].copy_(tensor[row])
            parameter.data = plain

    def _put_back(self) -> None:
        """What post-processing made goes into the ranges, row by row: no copy may span two memories."""
        claim = self._claim
        # What the kernel has been given stays where it is, also where no parameter shows it any more.
        given = {tensor.data_ptr() for tensor in self._given_to_kernel()}
        spare = {tensor.data_ptr(): tensor for tensor in self._ranges if tensor.data_ptr() not in given}
        for _, parameter in self._owned():
            spare.pop(parameter.data_ptr(), None)
        for name, parameter in self._module.named_parameters(recurse=False):
            data = parameter.data
            row_bytes = math.prod(data.shape[1:]) * data.dtype.itemsize
            is_rows = data.ndim >= 2 and data.shape[0] == claim.num_rows
            if not is_rows or claim.memory.owns(data) or not self._is_split(row_bytes):
                continue
            if not data.is_contiguous():
                raise UnsupportedEngineError(
                    f"{claim.name}.{name}", got=f"strides {data.stride()}", wanted="rows that lie apart"
                )
            target = self._room_for(data, spare=spare)
            for row in range(claim.num_rows):
                target[row].copy_(data[row])
            parameter.data = target
        for tensor in spare.values():
            claim.memory.release(claim.layer_id, tensor)
            self._ranges = [kept for kept in self._ranges if kept is not tensor]

    def _room_for(self, data: torch.Tensor, *, spare: dict[int, torch.Tensor]) -> torch.Tensor:
        """A range for a tensor that post-processing made: the one it came from, or a new one where rows changed size."""
        claim = self._claim
        for address, tensor in spare.items():
            if tensor.nbytes == data.nbytes:
                del spare[address]
                return tensor.view(-1).view(data.dtype).view(data.shape)
        target = claim.memory.allocate(claim.layer_id, shape=tuple(data.shape), dtype=data.dtype)
        self._ranges.append(target)
        return target

    def _moving(self) -> Iterator[torch.Tensor]:
        """Every tensor that moves with a row: vLLM's own list, and what the kernel has been given beside it."""
        yield from self._module.get_expert_weights()
        yield from self._given_to_kernel()

    def _given_to_kernel(self) -> Iterator[torch.Tensor]:
        """Tensors of R rows in the kernel's own configuration."""
        config = getattr(self._module.quant_method, "moe_quant_config", None)
        num_rows = self._claim.num_rows
        yield from (tensor for tensor in _tensors_in(config) if tensor.ndim and tensor.shape[0] == num_rows)


def _in_rows(tensor: torch.Tensor, *, targets: Sequence[int]) -> torch.Tensor:
    """The same rows, each where it belongs; those that nothing belongs into are anything."""
    moved = torch.empty_like(tensor)
    for source, target in enumerate(targets):
        moved[target].copy_(tensor[source])
    return moved


def _nothing() -> None:
    """Where vLLM has nothing to make."""


def _loads_whole_tensors(module: Any) -> bool:
    """Whether the model's loader copies [E, ...] at once: it has a loader of its own, or a format that does."""
    config = module.quant_config
    owner = next((cls.__name__ for cls in type(module).__mro__ if "weight_loader" in vars(cls)), "")
    return owner != _STOCK_CLASS or (config is not None and config.get_name() in _WHOLE_TENSOR_FORMATS)


def _tensors_in(value: object, *, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors in an object's attributes, and in theirs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type):
        for attribute in vars(value).values():
            yield from _tensors_in(attribute, depth=depth - 1)
