"""A small checkpoint of random bytes for the tests of the banks: an ExpertSource that knows what every row must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hotsplit.bank.source import RowLayout, RowTensor, Span, align

HIDDEN, INNER = 6, 4
"""D and F."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySource:
    """An ExpertSource."""

    files: Sequence[Path]
    layouts: Sequence[RowLayout]
    num_experts: int
    rows: Mapping[tuple[int, int], tuple[Span, ...]]
    expected: Mapping[tuple[int, int], Mapping[str, torch.Tensor]]
    """What the tensors of (layer_id, expert) must be, made apart from the spans."""

    def spans(self, layer_id: int, expert: int) -> Sequence[Span]:
        return self.rows[layer_id, expert]


def toy_source(
    folder: Path, *, num_layers: int = 2, num_experts: int = 4, is_split: bool = True, gap: int = 3, seed: int = 0
) -> ToySource:
    """Write a checkpoint of one file per layer.

    Args:
        folder: Where to.
        num_layers: L.
        num_experts: E.
        is_split: Whether gate and up lie apart in the file, with a gap between them; else at once, one behind the other.
        gap: Bytes between tensors of the file, so that they lie unaligned.
        seed: Of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = _layout()
    files, rows, expected = [], {}, {}
    for layer_id in range(num_layers):
        content = bytearray(b"\xff" * 13)
        for expert in range(num_experts):
            gate, up = (torch.randn(INNER, HIDDEN, generator=generator).bfloat16() for _ in range(2))
            down = torch.randn(HIDDEN, INNER, generator=generator).bfloat16()
            scale = torch.randint(0, 255, (5,), generator=generator, dtype=torch.uint8)
            expected[layer_id, expert] = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down, "scale": scale}
            parts = [(gate, 0), (up, gate.nbytes), (down, layout.tensors[1].offset), (scale, layout.tensors[2].offset)]
            spans = []
            for number, (tensor, row_offset) in enumerate(parts):
                content += b"\xff" * (gap if is_split or number != 1 else 0)
                spans.append(Span(file=layer_id, offset=len(content), num_bytes=tensor.nbytes, row_offset=row_offset))
                content += tensor.view(torch.uint8).numpy().tobytes()
            rows[layer_id, expert] = tuple(spans)
        files.append(folder / f"layer{layer_id}.bin")
        files[-1].write_bytes(content)
    return ToySource(
        files=tuple(files), layouts=(layout,) * num_layers, num_experts=num_experts, rows=rows, expected=expected
    )


def same(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> bool:
    """Whether two rows hold the same tensors, to the bit."""
    return expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)


def _layout() -> RowLayout:
    gate_up = RowTensor(name="gate_up_proj", offset=0, dtype=torch.bfloat16, shape=(2 * INNER, HIDDEN))
    down = RowTensor(name="down_proj", offset=align(gate_up.num_bytes), dtype=torch.bfloat16, shape=(HIDDEN, INNER))
    scale = RowTensor(name="scale", offset=align(down.offset + down.num_bytes), dtype=torch.uint8, shape=(5,))
    return RowLayout(tensors=(gate_up, down, scale))
