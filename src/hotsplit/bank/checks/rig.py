"""Layers of experts for the checks: an unpermuted copy in plain GPU memory, and rows in stitched ranges made from it.

    random_experts     weights of one layer in the order of expert ids: what results are held against
    Rig                the product's own RangeRows over CudaRowMemory, every expert in the row that its layer says
    draw_traffic       tokens, expert ids and routing weights, many of each, since no figure may come from a cache

Shapes: L layers, E experts, R rows, S draws, T tokens, K top-k, D model dim, I expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hotsplit.bank.checks.bench import Bench, LayerSize
from hotsplit.bank.cuda_ranges import can_stitch
from hotsplit.bank.cuda_row_memory import CudaRowMemory
from hotsplit.bank.kernels.reference import FP8, TOTALS, ExpertRows, LayerCounters
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.row_memory import RowTensor
from hotsplit.bank.rows import LayerRows, place

SCALE_BLOCK: Final = 128
"""Of float8 weights."""
_POISON: Final = 255
"""Byte of rows that nobody's expert lies in: NaN in every dtype here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of one layer, in the order of their ids."""

    tensors: Mapping[str, torch.Tensor]
    """By name in ExpertRows, each [E, ...]."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(tensor[0].nbytes for tensor in self.tensors.values())

    def as_rows(self) -> ExpertRows:
        """The unpermuted layer: row i is expert i, and all are hot."""
        return _expert_rows(self.tensors, first_cold=len(self.tensors["up"]))


def random_experts(bench: Bench, size: LayerSize, *, dtype: torch.dtype, seed: int) -> Experts:
    """Weights that keep values near 1 from layer to layer.

    Args:
        bench: Whose device holds them.
        size: Of the layer.
        dtype: bfloat16, or float8_e4m3fn with factors.
        seed: Of the numbers.
    """
    generator = bench.generator(seed)
    shapes = {
        "up": (size.num_experts, 2 * size.inner_dim, size.hidden_dim),
        "down": (size.num_experts, size.hidden_dim, size.inner_dim),
    }
    tensors = {}
    for name, shape in shapes.items():
        weight = bench.tensor(*shape, dtype=torch.bfloat16).normal_(generator=generator)
        tensors[name] = weight.mul_(shape[2] ** -0.5).to(dtype)
        if dtype == FP8:
            blocks = (shape[0], -(-shape[1] // SCALE_BLOCK), -(-shape[2] // SCALE_BLOCK))
            tensors[f"{name}_scale"] = bench.tensor(*blocks, dtype=torch.float32).uniform_(0.5, 2, generator=generator)
    return Experts(tensors=tensors)


class Rig:
    """Layers whose rows lie in two memories.

    Args:
        bench: Has the location of cold rows.
        experts: Of each layer, what its rows are filled with; must outlive the rig only for load().
        layers: Row numbers of each.
    """

    def __init__(self, bench: Bench, experts: Sequence[Experts], *, layers: Sequence[LayerRows]) -> None:
        self._device = bench.device
        self._experts = tuple(experts)
        self.layers = tuple(layers)
        """Row numbers as they are at first."""
        self._memory = CudaRowMemory(
            bench.memory(), device_type=bench.device.type, synchronise=bench.device.synchronise
        )
        self.rows = RangeRows(self.layers, memory=self._memory)
        """The memory behind the rows."""
        try:
            self._tensors = [self._make(layer_id, bench=bench) for layer_id in range(len(layers))]
            self.load()
        except BaseException:
            self.close()
            raise

    def expert_rows(self, layer_id: int) -> ExpertRows:
        """One layer as kernels take it.

        Args:
            layer_id: Ordinal.
        """
        return _expert_rows(self._tensors[layer_id], first_cold=self.layers[layer_id].first_cold)

    def tensors(self, layer_id: int) -> Sequence[RowTensor]:
        """Where each tensor of a layer has its rows, as swaps want it.

        Args:
            layer_id: Ordinal.
        """
        tensors = self._tensors[layer_id].values()
        return [RowTensor(pieces=((0, tensor.data_ptr()),), row_bytes=tensor[0].nbytes) for tensor in tensors]

    def load(self) -> None:
        """Bring every expert into the row where it is at first, and poison into the spare one."""
        self._device.synchronise()
        for layer_id, (experts, layer) in enumerate(zip(self._experts, self.layers, strict=True)):
            for name, tensor in self._tensors[layer_id].items():
                source, size = experts.tensors[name].data_ptr(), tensor[0].nbytes
                moves = [
                    (tensor.data_ptr() + row * size, source + expert * size) for expert, row in enumerate(layer.row_map)
                ]
                self._memory.copy(moves, num_bytes=size)
                if layer.spare_row is not None:
                    tensor[layer.spare_row].view(torch.uint8).fill_(_POISON)
        self._device.synchronise()

    def num_wrong(self, layer_id: int, *, row_map: Sequence[int]) -> int:
        """Experts whose bytes are not in the rows where they should be.

        Args:
            layer_id: Ordinal.
            row_map: Row of every expert, E of them.
        """
        tensors, source = self._tensors[layer_id], self._experts[layer_id].tensors
        return sum(
            not all(
                torch.equal(tensors[name][row].view(torch.uint8), source[name][expert].view(torch.uint8))
                for name in tensors
            )
            for expert, row in enumerate(row_map)
        )

    def close(self) -> None:
        """Give the rows back; the device must be done with them."""
        self.rows.close()

    def _make(self, layer_id: int, *, bench: Bench) -> dict[str, torch.Tensor]:
        """The tensors of one layer; what cannot be stitched stays in GPU memory and moves alike."""
        made = {}
        for name, source in self._experts[layer_id].tensors.items():
            shape = (self.layers[layer_id].num_rows, *source.shape[1:])
            if "scale" in name or not can_stitch(shape, dtype=source.dtype):
                made[name] = bench.tensor(*shape, dtype=source.dtype)
            else:
                made[name] = self.rows.allocate(layer_id, shape=shape, dtype=source.dtype)
        self.rows.register(layer_id, list(made.values()))
        return made


def _expert_rows(tensors: Mapping[str, torch.Tensor], *, first_cold: int) -> ExpertRows:
    return ExpertRows(
        up=tensors["up"],
        down=tensors["down"],
        up_scale=tensors.get("up_scale"),
        down_scale=tensors.get("down_scale"),
        scale_block=SCALE_BLOCK,
        first_cold=first_cold,
    )


def half_hot(num_experts: int, *, seed: int) -> LayerRows:
    """A layer that may swap, with a random half of its experts hot.

    Args:
        num_experts: E.
        seed: Of the choice.
    """
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed)).tolist()
    return place(order[: num_experts // 2], num_experts=num_experts, spare=True, inclusive=False)


def layer_counters(bench: Bench, num_experts: int, *, step: torch.Tensor) -> LayerCounters:
    """Counters of one layer, all zero.

    Args:
        bench: Whose device holds them.
        num_experts: E.
        step: One for all layers, [2], int64.
    """
    shapes = {"pairs": (2, num_experts), "totals": (2, len(TOTALS)), "stamps": (num_experts,)}
    zeros = {name: bench.tensor(*shape, dtype=torch.int64).zero_() for name, shape in shapes.items()}
    return LayerCounters(step=step, **zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is routed: S draws of T tokens."""

    hidden_states: torch.Tensor
    """[S, T, D], bfloat16."""
    topk_ids: torch.Tensor
    """Distinct experts of each token, [S, T, K], int64."""
    topk_weights: torch.Tensor
    """[S, T, K], float32."""


def draw_traffic(
    bench: Bench, size: LayerSize, *, num_tokens: int, draws: int, seed: int, wanted: torch.Tensor | None = None
) -> Traffic:
    """Draw tokens and choices.

    Args:
        bench: Whose device holds them.
        size: Of the layer.
        num_tokens: T.
        draws: S.
        seed: Of the numbers.
        wanted: How much each expert is wanted, [E], float32, on the CPU, 0 for never; None for all alike.
    """
    generator = torch.Generator().manual_seed(seed)
    chances_E = torch.ones(size.num_experts) if wanted is None else wanted
    ids_NK = torch.multinomial(
        chances_E.expand(draws * num_tokens, -1), size.top_k, replacement=False, generator=generator
    )
    weights_STK = torch.rand(draws, num_tokens, size.top_k, generator=generator) + 0.1
    hidden_STD = torch.randn(draws, num_tokens, size.hidden_dim, generator=generator)
    return Traffic(
        hidden_states=hidden_STD.to(bench.device.type, torch.bfloat16),
        topk_ids=ids_NK.view(draws, num_tokens, size.top_k).to(bench.device.type),
        topk_weights=weights_STK.to(bench.device.type),
    )
