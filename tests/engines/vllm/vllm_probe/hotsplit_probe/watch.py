"""What happens in one worker, seen from outside: every expert choice, every k-th result again, and every step.

The probe stands between vLLM's router and hotsplit: it sees the ids before hotsplit turns them into rows. What it
counts, it counts from those ids and from the row map as it is at that moment.

Shapes: L MoE layers, E experts, T tokens, K top-k.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index

from hotsplit_probe import live
from hotsplit_probe.layer import LayerProbe
from hotsplit_probe.memory import Memory

PHASES = ("decode", "prefill")


class Watch:
    """The probe of one worker.

    Args:
        folder: For every step, one line each.
        every: Recompute every so many MoE calls; 0 for none.
    """

    def __init__(self, folder: Path, *, every: int) -> None:
        self._folder, self._every = folder, every
        self.memory = Memory()
        self.layers: list[LayerProbe] = []
        self.padding = 0
        """Padding tokens that are put behind the real ones."""
        self.is_rolled = False
        """Whether kernels are given wrong rows: each expert those of the one before."""
        self.found = dict.fromkeys(("calls", "compared", "mismatches", "half_swapped_steps"), 0)
        self.found |= dict.fromkeys(("padding_tokens", "padding_rows_of_its_own"), 0)
        self._steps = 0
        self._totals = {what: dict.fromkeys(PHASES, 0) for what in ("tokens", "pairs", "hits")}
        self._phase: str = "prefill"
        self._step: dict[str, Any] = {}

    def begin_step(self, scheduler_output: Any) -> None:
        """Before vLLM runs a step: close the one before, and say what kind this one is.

        Args:
            scheduler_output: vLLM's.
        """
        if live.session() is None:
            return
        if not self.layers:
            self._install()
        self.end_step()
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return
        # Its own rule, from the scheduler alone: a step in which no request computes more than one token is decode.
        self._phase = "prefill" if max(scheduled.values()) > 1 else "decode"
        self._step = {"phase": self._phase, "tokens": sum(scheduled.values()), "pairs": 0, "hits": 0}
        # Between the two halves of a swap a layer has one hot expert more: in already, and out not yet.
        self.found["half_swapped_steps"] += bool((live.hot_mask().sum(axis=1) > self._settled_hot_L).any())

    def end_step(self) -> None:
        """Write down the step that has run."""
        if not self._step:
            return
        self._steps_file.write(json.dumps(self._step) + "\n")
        self._steps_file.flush()
        for what, by_phase in self._totals.items():
            by_phase[self._phase] += self._step[what]
        self._steps += 1
        self._step = {}

    def count(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Count what the router chose for one layer.

        Args:
            layer_id: Ordinal among MoE layers.
            topk_ids: Expert ids, [T, K].
        """
        if not self._step:
            return  # warm-up: vLLM runs it without a step
        counts_E = np.bincount(topk_ids.numpy().ravel(), minlength=self.num_experts)
        self._counts[self._phase][layer_id] += counts_E
        self._step["pairs"] += int(counts_E.sum())
        self._step["hits"] += int(counts_E[live.hot_mask()[layer_id]].sum())

    def is_due(self) -> bool:
        """Whether this call is one to compute again."""
        self.found["calls"] += 1
        return self._every > 0 and self.found["calls"] % self._every == 0

    def report(self) -> dict[str, Any]:
        """All that was found, as plain JSON."""
        self.end_step()
        counts = {
            phase: {str(layer): row_E.tolist() for layer, row_E in zip(self._decoder_layers, rows_LE, strict=True)}
            for phase, rows_LE in self._counts.items()
        }
        known = {"rank": self._rank, "steps": self._steps, "counts": counts, "memory": self.memory.found}
        return known | self._totals | self.found

    def _install(self) -> None:
        """Before the first step: a probe around each layer."""
        layers = live.layers()
        hot_LE = live.hot_mask()
        self._rank = int(layers[0].moe_config.tp_rank)
        self._decoder_layers = [extract_layer_index(layer.layer_name) for layer in layers]
        self._steps_file = (self._folder / f"rank{self._rank}.jsonl").open("w", encoding="utf-8")
        self._settled_hot_L = hot_LE.sum(axis=1)
        self._counts = {phase: np.zeros(hot_LE.shape, dtype=np.int64) for phase in PHASES}
        self.num_experts = hot_LE.shape[1]
        self.layers = [LayerProbe(layer, layer_id=layer_id, watch=self) for layer_id, layer in enumerate(layers)]
