"""How `hotsplit fit` looks: an object, or the bill of a GPU, the host's, and what binds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.fitting import FitResult
from hotsplit.plan.fit import Machine, Placement, host_bytes, kv_token_range, kv_tokens_per_gib
from hotsplit.plan.kv import KvCache
from hotsplit.plan.weigh import Range
from hotsplit.recipes.weighing import CHOSEN
from hotsplit.units import gib

_SOURCES = {
    "headers": "safetensors headers",
    "index": "config.json and the index's total size",
    "config": "config.json alone",
    "recipe": "the facts of a recipe",
}


def fit_json(result: FitResult) -> dict[str, Any]:
    """Everything, in bytes.

    Args:
        result: From fit_model.
    """
    weighed, found, sizes = result.weighed, result.fit, result.weighed.sizes
    return {
        "kind": "fit",
        "source": weighed.source,
        "model": {
            "name": sizes.name,
            "quantisation": sizes.quantisation,
            "expert_type": weighed.expert_type or sizes.quantisation,
            **sizes.identity.to_json(),
        },
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
    is_open = bool(kv.unknown) or CHOSEN in kv.kinds
    most = kv_token_range(result.weighed, machine=result.machine, load=load)
    return {
        "dtype": kv.dtype,
        "layers": kv.kinds,
        "bytes_per_token": None if is_open else kv.token_bytes,
        "window_bytes_per_sequence": None if is_open else kv.window_bytes(load.context),
        "state_bytes_per_sequence": None if is_open else kv.state_bytes,
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
    stored = sizes.quantisation or "not quantised"
    if weighed.expert_type not in (None, sizes.quantisation):
        stored = f"experts {weighed.expert_type}, all else {stored}"
    title = f"{sizes.name}: {what}, top-{identity.top_k}, {stored}"
    console.table(title, columns=["part", "on each GPU"], rows=_bill(result))
    console.prose(f"read from {_SOURCES[weighed.source]}; experts cut over {result.machine.num_gpus} GPU(s)")
    console.prose(f"KV cache: {_kept(weighed.kv)}")
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
    sizes = weighed.sizes
    low, high = int(sizes.row_bytes.min()), int(sizes.row_bytes.max())
    row = f"{low:,} bytes" if low == high else f"{low:,} to {high:,} bytes"
    loaded = "" if load.has_draft else " (not loaded without --draft)"
    rows = [
        ["GPU memory", gib(result.machine.vram_bytes)],
        ["reserve", gib(load.reserve_bytes)],
        ["dense weights", _spell(weighed.dense)],
        [f"KV cache, {load.concurrency} x {load.context:,} tokens", _spell(found.kv_bytes)],
        [
            "room for experts",
            _spell(found.room) if found.sure or not found.best else f"at most {gib(found.room.most or 0)}",
        ],
        [f"all experts (a row is {row})", gib(sizes.expert_bytes)],
    ]
    if weighed.draft.most != 0:
        rows.insert(3, [f"draft (MTP) layers{loaded}", _spell(weighed.draft)])
    return rows


def _kept(kv: KvCache) -> str:
    """What the cache is made of."""
    if CHOSEN in kv.kinds:
        return "as the recipe chose"
    kinds = ", ".join(f"{number} {kind}" for kind, number in kv.kinds.items())
    return f"{kinds} layers; {'unknown' if kv.unknown else f'{kv.token_bytes:,} bytes per token'}"


def _spell(bytes_: Range) -> str:
    """A range for people."""
    if bytes_.is_exact:
        return gib(bytes_.least)
    if bytes_.most is None:
        return f"at least {gib(bytes_.least)}" if bytes_.least else "unknown"
    return f"{gib(bytes_.least)} to {gib(bytes_.most)}"


def _print_placement(placement: Placement, *, result: FitResult) -> None:
    """Hot on the GPU, cold on the host, and what a token reads."""
    low, high = min(placement.hot_rows), max(placement.hot_rows)
    rows = f"{low}" if low == high else f"{low} to {high}"
    spare = f" and {placement.spare_rows} spare rows" if placement.spare_rows else ""
    console.prose(
        f"hot: {_end(result, known='at least ', open_='at most ')}{rows} experts per layer ({rate(placement.hot_share)})"
        f"{spare}, {gib(placement.used_bytes)} on each GPU"
    )
    per_node = _cold_ranges(result)
    named = ", ".join(f"node {node}: {_spell(need)}" for node, need in per_node.items())
    nodes = "" if None in per_node else f" ({named})"
    total = sum(per_node.values(), Range(least=0, most=0))
    console.prose(f"the host holds {_spell(total)} of cold experts{nodes}")
    if placement.cold_bytes:
        _print_orientation(placement, result=result)


def _end(result: FitResult, *, known: str, open_: str) -> str:
    """Which end of a range the placement is that is spoken of: the sure one, the best one, or both."""
    if result.fit.sure is None:
        return open_
    return "" if result.fit.sure == result.fit.best else known


def _cold_ranges(result: FitResult) -> dict[int | None, Range]:
    """Cold rows on the host by node, from the best end to the sure one."""
    ends = [
        None if end is None else host_bytes(end, machine=result.machine) for end in (result.fit.best, result.fit.sure)
    ]
    least, most = ends[0] or {}, ends[1]
    return {node: Range(least=cold, most=None if most is None else most[node]) for node, cold in least.items()}


def _print_orientation(placement: Placement, *, result: FitResult) -> None:
    """What a token would read, and what hot rows cost in cache."""
    seconds = _link_seconds(placement, machine=result.machine)
    link = "" if seconds is None else f", {1000 * seconds:.1f} ms over the link"
    bound = _end(result, known="at most ", open_="at least ")
    console.prose(
        f"for orientation: a token of uniform traffic reads {bound}{gib(placement.token_cold_bytes)} of cold experts per GPU{link}; "
        "with counts of real traffic hotsplit forecast tells more"
    )
    per_gib, most = (
        kv_tokens_per_gib(result.weighed),
        kv_token_range(result.weighed, machine=result.machine, load=result.load),
    )
    if per_gib is not None and most is not None:
        console.prose(
            f"a GiB of hot rows costs {per_gib:,} tokens of KV cache; with the fewest hot rows, {_spell_tokens(most)} tokens of it would fit"
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
