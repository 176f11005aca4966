"""Histograms on the command line: every form that plan reads, and PyTorch files, which only this edge opens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from hotsplit.cli.options import Integer
from hotsplit.errors import HistogramError
from hotsplit.files import read_bytes
from hotsplit.notices import Notice
from hotsplit.plan.convert import logical_counts
from hotsplit.plan.dialects import Document, Given, load_histogram, settle, split_set
from hotsplit.plan.histogram import PHASES, Histogram
from hotsplit.plan.tables import histogram_of_array

_TORCH = (".pt", ".pth")


def _parse_layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Decoder indices as people write them, ascending: "3-60", or "0,2,4-7"."""
    if value is None:
        return None
    layers: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not (_is_index(first) and (_is_index(last) or not dash)):
            raise click.BadParameter(f"got {part.strip()!r}; wanted decoder indices: 3-60, or 0,2,4-7")
        layers += range(int(first), int(last or first) + 1)
    if not layers or layers != sorted(set(layers)):
        raise click.BadParameter(f"got {value!r}; wanted ascending indices, each once")
    return tuple(layers)


layers_option = click.option(
    "--layers",
    callback=_parse_layers,
    metavar="LIST",
    help="Decoder index of every row, for files that do not number them: 3-60, or 0,2,4-7.",
)
experts_option = click.option(
    "--experts",
    type=Integer(min=1, max=2**24),
    help="Routed experts per layer, for files that leave unused ones out.",
)
phase_option = click.option(
    "--phase",
    type=click.Choice(PHASES),
    help="Phase of counts that do not say theirs; of counts that do, the one to keep.",
)


def read_histogram(
    name: str, *, given: Given | None = None, layers: Sequence[int] | None = None
) -> tuple[Histogram, list[Notice]]:
    """Read a histogram in any known form, PyTorch files among them.

    Args:
        name: FILE or FILE#SET.
        given: What the user says about it.
        layers: Decoder indices of the model at hand, if there is one.

    Raises:
        HistogramError: It cannot be read or believed.
        ImportError: A PyTorch file, and no torch.
    """
    file, chosen = split_set(name)
    if file.suffix not in _TORCH:
        return load_histogram(name, given=given, layers=layers)
    document = Document(content={}, what=f"histogram {name}", chosen=chosen, given=given or Given())
    histogram, notices = histogram_of_array(_torch_array(file), document, model_layers=layers)
    histogram, said = settle(histogram, document=document, layers=layers)
    return histogram, notices + said


def torch_bytes(histogram: Histogram) -> bytes:
    """A file as SGLang's recorder writes it, of one step.

    Args:
        histogram: Numbers of pairs.

    Raises:
        ImportError: There is no torch.
    """
    import torch

    file = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(logical_counts(histogram))}, file)
    return file.getvalue()


def _torch_array(file: Path) -> Any:
    """The counts in a PyTorch file, weights only: nothing in it is executed."""
    data = read_bytes(file, what="histogram", error=HistogramError)
    import torch

    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as failure:  # a damaged or hostile file makes torch raise anything
        reason = str(failure).splitlines()[0][:80] if str(failure) else type(failure).__name__
        raise HistogramError(f"histogram {file}", got=reason, wanted="a tensor, or logical_count") from failure
    counts = content.get("logical_count") if isinstance(content, dict) else content
    if not isinstance(counts, torch.Tensor):
        keys = f"keys {', '.join(map(str, list(content)[:5]))}" if isinstance(content, dict) else type(content).__name__
        raise HistogramError(f"histogram {file}", got=keys, wanted="a tensor, or one called logical_count")
    return np.asarray(counts.double().numpy() if counts.is_floating_point() else counts.numpy())


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
