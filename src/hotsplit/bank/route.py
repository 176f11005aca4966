"""The route op: expert ids become row numbers, and every routed pair is counted.

    topk_ids -> route -> row ids -> kernel          and, once per step:   stash -> flush -> Counters

On a CPU the op keeps a reference to the ids and counts once per step, in flush(), before anything is published: the
map that counts is the map that routed, so a hit is a hit of the moment it was routed. Counters only grow; a window is
the difference of two readings.

Shapes: L MoE layers, E experts, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.kept_rows import KeptRows
from hotsplit.bank.kernels import reference
from hotsplit.bank.rows import LayerRows
from hotsplit.plan.counters import PHASES, Counters, Phase

__all__ = ["PHASES", "Counters", "Phase", "Router", "StepRouter", "StepRouting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRouting:
    """What one step routed, as observers see it."""

    step: int
    """Engine step."""
    phase: Phase
    """A step that computes more than one token of any request is prefill."""
    layer_ids: tuple[int, ...]
    """Ordinals of the layers in the order they ran."""
    topk_ids: tuple[torch.Tensor, ...]
    """Their expert ids, [T, K] each."""
    is_padding: torch.Tensor | None
    """Tokens nobody asked for, [T], bool; None for none."""


class StepRouter(Protocol):
    """What an engine with kernels of its own routes by: Router on a CPU, DeviceRouter on a GPU."""

    row_map: torch.Tensor
    """Row of every expert as the host knows it, [L, E], int64, on the CPU."""
    counters: Counters
    """Everything counted, as far as it is known."""

    def begin_step(self, number: int, *, phase: Phase) -> None:
        """Count what serve() routes from now on."""

    def end_step(self) -> None:
        """Count no more."""

    def abandon_step(self) -> None:
        """Count no more; the step broke off."""

    def serve(self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Row ids for expert ids, [T, K]."""

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Change one entry of the row map."""

    def hot_mask(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot now, [L, E], bool."""

    def flush(self) -> None:
        """Bring the counters up to date, as far as that needs no waiting."""

    def settle(self) -> None:
        """Bring the counters up to date; may wait."""


class Router:
    """The row maps and counters of all layers of one rank.

    Args:
        layers: Rows per layer as the banks were built, L of them.
        row_bytes: Bytes of one row per layer, [L].
        redirect_padding: Let padding touch no row of its own; off where its outputs must equal the stock engine's.
        copies_ids: Keep copies of the ids until they are counted: for engines that use their buffers again.
        kept: Where the cold path notes which rows of a step lay in slots; None where there are no slots.
    """

    def __init__(
        self,
        layers: Sequence[LayerRows],
        *,
        row_bytes: Sequence[int],
        redirect_padding: bool = True,
        copies_ids: bool = False,
        kept: KeptRows | None = None,
    ) -> None:
        self._maps = {dtype: _padded_maps(layers, dtype=dtype) for dtype in (torch.int64, torch.int32)}
        num_layers, self._num_experts = len(layers), len(layers[0].row_map)
        self.row_map = self._maps[torch.int64][:, : self._num_experts]
        """Row of every expert, [L, E], int64, at one address for ever: publishes write into it."""
        self._copies_ids = copies_ids
        self._first_cold_L = np.array([rows.first_cold for rows in layers], dtype=np.int64)
        self._row_bytes_L = np.array(row_bytes, dtype=np.int64)
        self._redirect_padding = redirect_padding
        self._stash: list[tuple[int, torch.Tensor]] = []
        self._stash_context: tuple[int, Phase, torch.Tensor | None] = (0, "decode", None)
        self._serving: tuple[int, Phase] | None = None
        self._mask_seen: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._kept = kept
        self.counters = Counters.zeros((num_layers, self._num_experts), has_slots=kept is not None)
        """Everything counted so far; flush() brings it up to date."""
        self.observers: list[Callable[[StepRouting], None]] = []
        """Called by flush() with what the step routed."""

    def route(
        self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None, phase: Phase, step: int
    ) -> torch.Tensor:
        """Count one layer's pairs and say in which rows they lie.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], integer; ids outside 0..E-1 are sentinels, neither counted nor mapped.
            is_padding: The engine's own padding mask, [T], bool; None for none.
            phase: Of the whole step.
            step: Engine step; all calls between two flushes carry the same.

        Returns:
            Row ids, [T, K], int64.
        """
        self.stash(layer_id, topk_ids, is_padding=is_padding, phase=phase, step=step)
        if is_padding is None or not self._redirect_padding:
            return self._rows(layer_id, topk_ids)
        return reference.route(
            topk_ids,
            row_map=self.row_map[layer_id],
            is_padding=is_padding,
            redirect_padding=self._redirect_padding,
        )

    def _rows(self, layer_id: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids without padding; in numpy, whose calls cost a third of torch's, once per layer and token."""
        ids_TK = topk_ids.numpy()
        is_expert_TK = (ids_TK >= 0) & (ids_TK < self._num_experts)
        map_E = self.row_map[layer_id].numpy()
        if is_expert_TK.all():
            return torch.from_numpy(map_E[ids_TK])
        safe_TK = np.where(is_expert_TK, ids_TK, 0)
        return torch.from_numpy(np.where(is_expert_TK, map_E[safe_TK], ids_TK).astype(np.int64))

    def remap(self, layer_id: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids that an engine vouches for, in one gather: for engines that count elsewhere, with stash().

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], int32 or int64; -1, the only negative one, stays -1; ids of fixed rows are
                E, E + 1 and so on.

        Returns:
            Row ids, [T, K], of the dtype of topk_ids.

        Raises:
            IndexError: An id behind them.
        """
        return self._maps[topk_ids.dtype][layer_id][topk_ids]

    def stash(
        self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None, phase: Phase, step: int
    ) -> None:
        """Keep one layer's ids until flush() counts them.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], integer.
            is_padding: The engine's own padding mask, [T], bool; None for none.
            phase: Of the whole step.
            step: Engine step; all calls between two flushes carry the same.
        """
        if self._kept is not None and not self._stash:
            # Here, where a step begins for sure: what an interrupt, or a row wanted outside of steps, has left is gone.
            self._kept.forget()
        self._stash.append((layer_id, topk_ids.clone() if self._copies_ids else topk_ids))
        self._stash_context = (step, phase, is_padding)

    def discard(self) -> None:
        """Forget the calls since the last flush."""
        self._stash = []

    def begin_step(self, number: int, *, phase: Phase) -> None:
        """Count what serve() routes from now on.

        Args:
            number: Of the engine step.
            phase: Of the whole step.
        """
        # An engine may write every mask into the same tensor: one that was looked at before is looked at again.
        self._serving, self._mask_seen = (number, phase), None

    def end_step(self) -> None:
        """Count no more, and bring the counters up to date."""
        self._serving = None
        self.flush()

    def abandon_step(self) -> None:
        """Count no more, and forget the step: it broke off, and half a step's counts would fit nothing."""
        self._serving = None
        self.discard()

    def serve(self, layer_id: int, topk_ids: torch.Tensor, *, is_padding: torch.Tensor | None) -> torch.Tensor:
        """Say in which rows an engine's ids lie, and count them where a step runs.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K], as remap() takes them.
            is_padding: The engine's own mask, at least [T], bool, one for all layers of a step; None for none.

        Returns:
            Row ids, [T, K], of the dtype of topk_ids.
        """
        masked = self._masked(is_padding, num_tokens=topk_ids.shape[0])
        if self._serving is not None:
            number, phase = self._serving
            self.stash(layer_id, topk_ids, is_padding=masked, phase=phase, step=number)
        row_ids = self.remap(layer_id, topk_ids)
        return row_ids if masked is None else reference.redirect(row_ids, is_padding=masked)

    def _masked(self, is_padding: torch.Tensor | None, *, num_tokens: int) -> torch.Tensor | None:
        """The mask of these tokens; None where nothing is padding, found out once per step and not in every layer."""
        if is_padding is None:
            return None
        if self._serving is None or self._mask_seen is None or is_padding is not self._mask_seen[0]:
            mask_T = is_padding[:num_tokens]
            self._mask_seen = (is_padding, mask_T if bool(mask_T.any()) else None)
        return self._mask_seen[1]

    def publish(self, layer_id: int, *, expert: int, row: int) -> None:
        """Change one entry of the row map, in place, between steps.

        Args:
            layer_id: Ordinal among MoE layers.
            expert: Expert id.
            row: Where it lies from now on.
        """
        for maps in self._maps.values():
            maps[layer_id, expert] = row

    def hot_mask(self) -> npt.NDArray[np.bool_]:
        """Which experts are hot now, [L, E], bool."""
        mask: npt.NDArray[np.bool_] = self.row_map.numpy() < self._first_cold_L[:, None]
        return mask

    def flush(self) -> None:
        """Count the step that has run; call it between steps, before publishing."""
        if not self._stash:
            return
        step, phase, is_padding = self._stash_context
        stash, self._stash = self._stash, []
        counts_LE, num_tokens = self._count(stash, is_padding=is_padding)
        hot_LE = self.hot_mask()
        touched_LE = (counts_LE > 0) * self._row_bytes_L[:, None]
        counters = self.counters
        counters.steps += 1
        counters.tokens[phase] += num_tokens
        counters.counts[phase] += counts_LE
        counters.hits[phase] += int(counts_LE[hot_LE].sum())
        counters.touched_hot_bytes[phase] += int(touched_LE[hot_LE].sum())
        counters.touched_cold_bytes[phase] += int(touched_LE[~hot_LE].sum())
        if self._kept is not None and counters.kept_bytes is not None:
            counters.kept_bytes[phase] += int((touched_LE * ~hot_LE)[self._kept.at()].sum())
        if self.observers:
            layer_ids, ids = zip(*stash, strict=True)
            seen = StepRouting(step=step, phase=phase, layer_ids=layer_ids, topk_ids=ids, is_padding=is_padding)
            for observe in self.observers:
                observe(seen)

    def settle(self) -> None:
        """The same: on a CPU nothing is ever waited for."""
        self.flush()

    def _count(
        self, stash: Sequence[tuple[int, torch.Tensor]], *, is_padding: torch.Tensor | None
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Pairs per layer and expert, [L, E], and real tokens, in one bincount for all layers."""
        num_layers = self.row_map.shape[0]
        bins = self._num_experts + 1  # the last bin takes padding and sentinels
        kept = None if is_padding is None or not bool(is_padding.any()) else (~is_padding).numpy()
        cells = []
        for layer_id, topk_ids in stash:
            ids_N = topk_ids.numpy() if kept is None else topk_ids.numpy()[kept]
            cells.append(np.where((ids_N >= 0) & (ids_N < self._num_experts), ids_N, bins - 1) + layer_id * bins)
        flat = np.concatenate([cell.ravel() for cell in cells])
        counts_LE = np.bincount(flat, minlength=num_layers * bins).reshape(num_layers, bins)[:, :-1]
        num_tokens = len(stash[0][1]) if kept is None else int(kept.sum())
        return counts_LE, num_tokens


def _padded_maps(layers: Sequence[LayerRows], *, dtype: torch.dtype) -> torch.Tensor:
    """Row maps as one gather needs them, [L, E + fixed + 1]: the last entry is where id -1 points, and stays -1."""
    rows = [(*layer.row_map, *layer.fixed_rows, -1) for layer in layers]
    return torch.tensor(rows, dtype=dtype)
