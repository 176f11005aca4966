"""Small histograms, sizes and plans for the tests of plan/, and the published histograms where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hotsplit.plan.dialects import load_histogram
from hotsplit.plan.histogram import Histogram, PhaseCounts
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.sizes import ExpertSizes

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "histograms"


def histogram_of(counts: npt.ArrayLike, *, top_k: int = 1, first_layer: int = 0, phase: str = "decode") -> Histogram:
    """Counts [L, E] of decoder layers first_layer.. on."""
    counts_LE = np.asarray(counts, dtype=np.float64)
    layers = tuple(range(first_layer, first_layer + len(counts_LE)))
    identity = ModelIdentity(model_type="toy", layers=layers, num_experts=counts_LE.shape[1], top_k=top_k)
    return Histogram(identity=identity, phases={phase: PhaseCounts(counts=counts_LE)})


def sizes_of(
    row_bytes: npt.ArrayLike, *, num_experts: int, top_k: int = 1, first_layer: int = 0, fixed_bytes: int = 0
) -> ExpertSizes:
    """Row bytes [L] of decoder layers first_layer.. on; `fixed_bytes` per layer."""
    rows_L = np.asarray(row_bytes, dtype=np.int64)
    layers = tuple(range(first_layer, first_layer + len(rows_L)))
    return ExpertSizes(
        identity=ModelIdentity(model_type="toy", layers=layers, num_experts=num_experts, top_k=top_k),
        row_bytes=rows_L,
        fixed_bytes=np.full(len(rows_L), fixed_bytes, dtype=np.int64),
        dense_bytes=0,
        headers_hash="0" * 64,
        num_decoder_layers=first_layer + len(rows_L),
    )


def published(name: str) -> Histogram:
    """A published histogram, "FILE" or "FILE#set"; the test is skipped where the files are absent."""
    if not (PUBLISHED / name.partition("#")[0]).exists():
        pytest.skip(f"{name} is not beside this repository")
    return load_histogram(str(PUBLISHED / name))[0]
