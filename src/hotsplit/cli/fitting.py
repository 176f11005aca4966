"""What `hotsplit fit` does and how it looks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.config import HotsplitConfig
from hotsplit.errors import ConfigError
from hotsplit.plan.fit import Fit, Load, Machine, Placement, fit, host_bytes, kv_token_range, kv_tokens_per_gib
from hotsplit.plan.weigh import Range, Weighed, weigh, with_dense
from hotsplit.units import GIB, gib

_MAX_GIB = 2.0**23
"""Eight exbibytes: no machine has more, and all numbers stay exact."""
_SOURCES = {
    "headers": "safetensors headers",
    "index": "config.json and the index's total size",
    "config": "config.json alone",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitTask:
    """What `hotsplit fit` was asked for."""

    config: HotsplitConfig
    """Reserve and mode."""
    model: Path
    """Folder or config.json."""
    gpus: int
    """Ranks."""
    vram_gib: float
    """Of one GPU."""
    ram_gib: str
    """Of the machine, or of each NUMA node, separated by commas."""
    numa: str | None
    """NUMA node of each GPU, separated by commas."""
    link: float | None
    """GB/s."""
    context: int
    """Tokens per sequence."""
    concurrency: int
    """Sequences at once."""
    kv_dtype: str | None
    """Type of the KV cache."""
    draft: bool
    """Whether draft layers are loaded."""
    dense_gib: float | None
    """The user's word for the dense weights on one GPU."""
    ram_reserve_gib: float
    """Host memory left free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """A model on a machine."""

    weighed: Weighed
    """The model."""
    machine: Machine
    """What there is."""
    load: Load
    """What was asked."""
    fit: Fit
    """What came out."""


def fit_model(task: FitTask) -> FitResult:
    """Check the numbers, weigh, and fit.

    Args:
        task: What was asked for.

    Raises:
        ConfigError: A number is not possible.
        CheckpointError: The model cannot be weighed.
    """
    machine = Machine(
        num_gpus=task.gpus,
        vram_bytes=_bytes("--vram-gib", task.vram_gib),
        ram_bytes=tuple(_bytes("--ram-gib", _number("--ram-gib", part)) for part in task.ram_gib.split(",")),
        nodes=None if task.numa is None else tuple(_node(part) for part in task.numa.split(",")),
        link_bytes_per_s=None if task.link is None else _link(task.link),
    )
    load = Load(
        context=task.context,
        concurrency=task.concurrency,
        reserve_bytes=task.config.vram_reserve_bytes,
        ram_reserve_bytes=_bytes("--ram-reserve-gib", task.ram_reserve_gib),
        has_draft=task.draft,
        dynamic=task.config.dynamic,
    )
    dense = None if task.dense_gib is None else _bytes("--dense-gib", task.dense_gib)
    weighed = weigh(task.model.expanduser(), tp=task.gpus, kv_dtype=task.kv_dtype)
    weighed = weighed if dense is None else with_dense(weighed, dense)
    return FitResult(weighed=weighed, machine=machine, load=load, fit=fit(weighed, machine=machine, load=load))


def _bytes(option: str, gibs: float) -> int:
    """GiB of memory in bytes."""
    if not (math.isfinite(gibs) and 0 <= gibs <= _MAX_GIB):
        raise ConfigError(option, got=f"{gibs:g}", wanted=f"0 to {_MAX_GIB:,.0f} GiB", do="check the unit", value=gibs)
    return int(gibs * GIB)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(option, got=repr(text), wanted="GiB, or GiB of each NUMA node: 256,256") from error


def _node(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text) <= 6):
        raise ConfigError("--numa", got=repr(text), wanted="a node's number for each GPU: 0,0,1,1")
    return int(text)


def _link(gigabytes: float) -> float:
    """GB/s in bytes per second; what no link has is another unit."""
    if not 0.1 <= gigabytes <= 1000:
        raise ConfigError("--link", got=f"{gigabytes:g} GB/s", wanted="0.1 to 1000 GB/s", do="check the unit")
    return gigabytes * 1e9


def fit_json(result: FitResult) -> dict[str, Any]:
    """Everything, in bytes.

    Args:
        result: From fit_model.
    """
    weighed, found, sizes = result.weighed, result.fit, result.weighed.sizes
    return {
        "kind": "fit",
        "source": weighed.source,
        "model": {"name": sizes.name, "quantisation": sizes.quantisation, **sizes.identity.to_json()},
        "gpus": result.machine.num_gpus,
        "fits": found.fits,
        "expert_bytes": sizes.expert_bytes,
        "row_bytes": dict(zip(map(str, sizes.identity.layers or ()), sizes.row_bytes.tolist(), strict=True)),
        "dense_bytes": asdict(weighed.dense),
        "draft_bytes": {**asdict(weighed.draft), "loaded": result.load.has_draft},
        "kv": _kv_json(result),
        "reserve_bytes": result.load.reserve_bytes,
        "room_bytes": asdict(found.room),
        "sure": _placement_json(found.sure, result=result),
        "best": _placement_json(found.best, result=result),
        "findings": [asdict(finding) for finding in found.findings],
        "notices": [str(notice) for notice in weighed.notices],
    }


def _kv_json(result: FitResult) -> dict[str, Any]:
    kv, load = result.weighed.kv, result.load
    most = kv_token_range(result.weighed, machine=result.machine, load=load)
    return {
        "dtype": kv.dtype,
        "layers": kv.kinds,
        "bytes_per_token": None if kv.unknown else kv.token_bytes,
        "window_bytes_per_sequence": None if kv.unknown else kv.window_bytes(load.context),
        "state_bytes_per_sequence": None if kv.unknown else kv.state_bytes,
        "context": load.context,
        "concurrency": load.concurrency,
        "bytes": asdict(result.fit.kv_bytes),
        "unknown": list(kv.unknown),
        "most_tokens": None if most is None else asdict(most),
        "tokens_per_hot_gib": kv_tokens_per_gib(result.weighed),
    }


def _placement_json(placement: Placement | None, *, result: FitResult) -> dict[str, Any] | None:
    if placement is None:
        return None
    layers = result.weighed.sizes.identity.layers or ()
    per_node = host_bytes(placement, machine=result.machine)
    return {
        **asdict(placement),
        "hot_rows": dict(zip(map(str, layers), placement.hot_rows, strict=True)),
        "host_bytes": sum(per_node.values()),
        "host_bytes_per_node": None if None in per_node else {str(node): need for node, need in per_node.items()},
        "token_link_seconds": _link_seconds(placement, machine=result.machine),
    }


def _link_seconds(placement: Placement, *, machine: Machine) -> float | None:
    return None if machine.link_bytes_per_s is None else placement.token_cold_bytes / machine.link_bytes_per_s


def print_fit(result: FitResult, *, per_layer: bool) -> None:
    """The bill of one GPU, the host's, and what binds.

    Args:
        result: From fit_model.
        per_layer: Whether to print every layer.
    """
    weighed, sizes = result.weighed, result.weighed.sizes
    identity = sizes.identity
    what = f"{len(identity.layers or ())} of {sizes.num_decoder_layers} layers x {identity.num_experts} experts"
    title = f"{sizes.name}: {what}, top-{identity.top_k}, {sizes.quantisation or 'not quantised'}"
    console.table(title, columns=["on each GPU", ""], rows=_bill(result))
    console.prose(f"read from {_SOURCES[weighed.source]}; experts cut over {result.machine.num_gpus} GPU(s)")
    placement = result.fit.placement
    if placement is not None:
        _print_placement(placement, result=result)
    if per_layer and placement is not None:
        _print_layers(placement, result=result)
    for finding in result.fit.findings:
        console.prose(
            finding.text, label="! " if finding.binds else "- ", indent=2, style="bold" if finding.binds else ""
        )
    verdict = {True: "it fits", False: "it does not fit", None: "whether it fits is open"}[result.fit.fits]
    console.prose(verdict, style="bold")


def _bill(result: FitResult) -> list[list[str]]:
    """What one GPU holds, line by line."""
    weighed, found, load = result.weighed, result.fit, result.load
    sizes, kv = weighed.sizes, weighed.kv
    low, high = int(sizes.row_bytes.min()), int(sizes.row_bytes.max())
    row = f"{low:,} bytes" if low == high else f"{low:,} to {high:,} bytes"
    kinds = ", ".join(f"{number} {kind}" for kind, number in kv.kinds.items())
    loaded = "" if load.has_draft else " (not loaded without --draft)"
    token = "unknown" if kv.unknown else f"{kv.token_bytes:,} bytes per token"
    rows = [
        ["GPU memory", gib(result.machine.vram_bytes)],
        ["reserve", gib(load.reserve_bytes)],
        ["dense weights", _spell(weighed.dense)],
        [f"KV cache, {load.concurrency} x {load.context:,} tokens ({kinds} layers; {token})", _spell(found.kv_bytes)],
        [
            "room for experts",
            _spell(found.room) if found.sure or not found.best else f"at most {gib(found.room.most or 0)}",
        ],
        [f"all experts (a row is {row})", gib(sizes.expert_bytes)],
    ]
    if weighed.draft.most != 0:
        rows.insert(3, [f"draft (MTP) layers{loaded}", _spell(weighed.draft)])
    return rows


def _spell(bytes_: Range) -> str:
    """A range for people."""
    if bytes_.is_exact:
        return gib(bytes_.least)
    if bytes_.most is None:
        return f"at least {gib(bytes_.least)}" if bytes_.least else "unknown"
    return f"{gib(bytes_.least)} to {gib(bytes_.most)}"


def _print_placement(placement: Placement, *, result: FitResult) -> None:
    """Hot on the GPU, cold on the host, and what a token reads."""
    at_most = "" if result.fit.sure is not None else "at most "
    at_least = "" if result.fit.sure is not None else "at least "
    low, high = min(placement.hot_rows), max(placement.hot_rows)
    rows = f"{low}" if low == high else f"{low} to {high}"
    spare = f" and {placement.spare_rows} spare rows" if placement.spare_rows else ""
    console.prose(
        f"hot: {at_most}{rows} experts per layer ({rate(placement.hot_share)}){spare}, {gib(placement.used_bytes)} on each GPU"
    )
    per_node = host_bytes(placement, machine=result.machine)
    nodes = (
        "" if None in per_node else f" ({', '.join(f'node {node}: {gib(need)}' for node, need in per_node.items())})"
    )
    console.prose(f"the host holds {at_least}{gib(sum(per_node.values()))} of cold experts{nodes}")
    if placement.cold_bytes:
        _print_orientation(placement, result=result)


def _print_orientation(placement: Placement, *, result: FitResult) -> None:
    """What a token would read, and what hot rows cost in cache."""
    seconds = _link_seconds(placement, machine=result.machine)
    link = "" if seconds is None else f", {1000 * seconds:.1f} ms over the link"
    at_least = "" if result.fit.sure is not None else "at least "
    console.prose(
        f"for orientation: a token of uniform traffic reads {at_least}{gib(placement.token_cold_bytes)} of cold experts per GPU{link}; "
        "with counts of real traffic hotsplit forecast tells more"
    )
    per_gib, most = (
        kv_tokens_per_gib(result.weighed),
        kv_token_range(result.weighed, machine=result.machine, load=result.load),
    )
    if per_gib is not None and most is not None:
        console.prose(
            f"a GiB of hot rows costs {per_gib:,} tokens of KV cache; beside the fewest hot rows {_spell_tokens(most)} fit"
        )


def _spell_tokens(tokens: Range) -> str:
    """A range of tokens for people; without a lower end it is no more than an upper one."""
    if tokens.is_exact:
        return f"{tokens.least:,}"
    return f"{tokens.least:,} to {tokens.most:,}" if tokens.least else f"at most {tokens.most:,}"


def _print_layers(placement: Placement, *, result: FitResult) -> None:
    sizes = result.weighed.sizes
    num_experts = sizes.identity.num_experts or 0
    rows = [
        [str(layer), f"{row:,}", str(hot), gib((num_experts - hot) * row)]
        for layer, row, hot in zip(
            sizes.identity.layers or (), sizes.row_bytes.tolist(), placement.hot_rows, strict=True
        )
    ]
    console.table("", columns=["layer", "row bytes", "hot", "cold per GPU"], rows=rows)
