"""What of a model fits a machine, what the host must hold, and which number binds: before anything is bought or loaded.

Beside the planner: `weighed model + machine + load -> placement`. Without counts every layer gets the same number of hot
rows, as the planner would give it; a plan from counts takes the same bytes. A GPU holds, besides hot rows and their spare
rows: dense weights, the KV cache that is asked for, draft layers if they are loaded, and the reserve.

    room = GPU memory - reserve - dense - draft - KV cache      room pays for hot rows, spare rows
    host = cold rows of all ranks                               exactly: (E - hot) x row bytes per layer and rank

Where dense or KV bytes are a range, so is the result: `sure` is what fits whatever they turn out to be, `best` what
fits at their lower end.

Shapes: L MoE layers, E routed experts per layer, H hot rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotsplit.errors import ConfigError
from hotsplit.plan.budget import StageBudget, spread
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.plan.weigh import Range, Weighed
from hotsplit.units import GIB, gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is."""

    num_gpus: int
    """One rank each."""
    vram_bytes: int
    """Of one GPU."""
    ram_bytes: tuple[int, ...]
    """Host memory: one number for the machine, or one per NUMA node."""
    nodes: tuple[int, ...] | None = None
    """NUMA node of each GPU; None where nobody told."""
    link_bytes_per_s: float | None = None
    """What one GPU reads of host memory in place; None where nobody told."""

    def __post_init__(self) -> None:
        if self.nodes is not None and len(self.nodes) != self.num_gpus:
            raise ConfigError("--numa", got=f"{len(self.nodes)} nodes", wanted=f"one for each of {self.num_gpus} GPUs")
        if len(self.ram_bytes) > 1 and (self.nodes is None or max(self.nodes) >= len(self.ram_bytes)):
            got = f"memory of {len(self.ram_bytes)} NUMA nodes"
            raise ConfigError("--ram-gib", got=got, wanted="--numa with a node below that for each GPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of it."""

    context: int
    """Tokens per sequence."""
    concurrency: int
    """Sequences at once."""
    reserve_bytes: int
    """Of GPU memory, left for CUDA graphs and activations."""
    ram_reserve_bytes: int
    """Of host memory, left for everything else."""
    has_draft: bool = False
    """Whether draft (MTP) layers are loaded."""
    dynamic: bool = True
    """Whether experts swap: every layer then keeps top_k hot rows and a spare one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Hot and cold on one rank, and what follows from it."""

    room_bytes: int
    """For experts."""
    hot_rows: tuple[int, ...]
    """Per MoE layer, [L], spare rows not counted."""
    spare_rows: int
    """Of all layers."""
    used_bytes: int
    """Of the room: hot rows, spare rows and what stays fast."""
    cold_bytes: int
    """Of cold rows."""
    token_cold_bytes: int
    """That a token reads of cold rows if traffic is uniform; real traffic reads less."""
    hot_share: float
    """Hot experts / all experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to know before buying or booting."""

    name: str
    """A stable name."""
    binds: bool
    """Whether it stops this setup."""
    text: str
    """The number that binds, and the way out."""
    is_open: bool = False
    """Whether it stops this setup at one end of a range, and not at the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A model on a machine."""

    kv_bytes: Range
    """The cache that is asked for, on one rank."""
    draft_bytes: Range
    """Draft layers that are loaded, on one rank."""
    room: Range
    """For experts: from the sure end to the best one; `most` is always known. Below 0 where nothing is left."""
    sure: Placement | None
    """What fits whatever the ranges turn out to be; None where that is unknown, or nothing fits."""
    best: Placement | None
    """What fits at their lower end; None where nothing fits."""
    findings: tuple[Finding, ...]
    """Those that bind first."""

    @property
    def placement(self) -> Placement | None:
        """The one to speak of: the sure one, else the best."""
        return self.sure or self.best

    @property
    def fits(self) -> bool | None:
        """Whether it runs: True surely, False surely not, None where the ranges leave it open."""
        if any(finding.binds for finding in self.findings):
            return False
        return None if self.sure is None or any(finding.is_open for finding in self.findings) else True


def fit(weighed: Weighed, *, machine: Machine, load: Load) -> Fit:
    """Put a model on a machine.

    Args:
        weighed: The model, for tensor parallelism over all GPUs.
        machine: What there is.
        load: What is asked of it.
    """
    kv = _kv_range(weighed, load=load)
    draft = weighed.draft if load.has_draft else Range(least=0, most=0)
    taken = weighed.dense + kv + draft
    best_room = machine.vram_bytes - load.reserve_bytes - taken.least
    sure_room = None if taken.most is None else machine.vram_bytes - load.reserve_bytes - taken.most
    best = place_experts(weighed.sizes, room=best_room, dynamic=load.dynamic)
    sure = None if sure_room is None else place_experts(weighed.sizes, room=sure_room, dynamic=load.dynamic)
    findings = [
        *_heads_findings(weighed, machine=machine),
        *_vram_findings(weighed, best=best, room=best_room, machine=machine, load=load),
        *_open_findings(weighed, sure=sure, best=best, sure_room=sure_room),
        *_host_findings(weighed, sure=sure, best=best, machine=machine, load=load),
        *_whole_findings(weighed, sure=sure),
    ]
    room = Range(least=best_room if sure_room is None else sure_room, most=best_room)
    ordered = tuple(sorted(findings, key=lambda finding: not finding.binds))
    return Fit(kv_bytes=kv, draft_bytes=draft, room=room, sure=sure, best=best, findings=ordered)


def place_experts(sizes: ExpertSizes, *, room: int, dynamic: bool) -> Placement | None:
    """Give every layer the same number of hot rows, at the prices of its own rows.

    Args:
        sizes: Of the routed experts on one rank.
        room: Bytes for them.
        dynamic: Whether every layer keeps top_k hot rows and a spare one.

    Returns:
        The placement; None where the room is too small for any.
    """
    stage = _stage(sizes, room=room, dynamic=dynamic)
    if room < stage.least_bytes:
        return None
    hot_L: npt.NDArray[np.int64] = spread(stage).sum(axis=1)
    num_experts, top_k = stage.num_experts, sizes.identity.top_k or 1
    cold_L = num_experts - hot_L
    return Placement(
        room_bytes=room,
        hot_rows=tuple(hot_L.tolist()),
        spare_rows=int((hot_L < num_experts).sum()) if stage.swap_rows else 0,
        used_bytes=stage.used_bytes(hot_L),
        cold_bytes=int((cold_L * sizes.row_bytes).sum()),
        token_cold_bytes=int((cold_L * sizes.row_bytes).sum() * top_k // num_experts),
        hot_share=float(hot_L.sum()) / (num_experts * len(hot_L)),
    )


def host_bytes(placement: Placement, *, machine: Machine) -> dict[int | None, int]:
    """Cold rows of all ranks, per NUMA node of their GPUs.

    Args:
        placement: On one rank.
        machine: Its GPUs, and their nodes where they are known.

    Returns:
        Bytes by node; by None, all of them, where nobody told the nodes.
    """
    if machine.nodes is None:
        return {None: placement.cold_bytes * machine.num_gpus}
    ranks_on = Counter(machine.nodes)
    return {node: placement.cold_bytes * ranks_on[node] for node in sorted(ranks_on)}


def kv_tokens(weighed: Weighed, *, machine: Machine, load: Load) -> int | None:
    """The most tokens that the KV cache can hold beside the fewest hot rows.

    Args:
        weighed: The model.
        machine: What there is.
        load: What is asked of it; its context sets how much sliding windows and states take.

    Returns:
        Tokens over all sequences, at the lower end of ranges; None where the cache is unknown or does not grow.
    """
    tokens = kv_token_range(weighed, machine=machine, load=load)
    return None if tokens is None else tokens.most


def kv_token_range(weighed: Weighed, *, machine: Machine, load: Load) -> Range | None:
    """Between what and what `kv_tokens` lies: the more dense weights take, the fewer tokens fit.

    Args:
        weighed: The model.
        machine: What there is.
        load: What is asked of it.

    Returns:
        Tokens over all sequences, from 0 where dense or draft bytes have no upper end; None where the cache is unknown
        or does not grow.
    """
    if weighed.kv.unknown or not weighed.kv.token_bytes:
        return None
    stage = _stage(weighed.sizes, room=0, dynamic=load.dynamic)
    fixed = (weighed.kv.window_bytes(load.context) + weighed.kv.state_bytes) * load.concurrency
    taken = weighed.dense + (weighed.draft if load.has_draft else Range(least=0, most=0))
    left = machine.vram_bytes - load.reserve_bytes - fixed - stage.least_bytes
    least = 0 if taken.most is None else max((left - taken.most) // weighed.kv.token_bytes, 0)
    return Range(least=least, most=max((left - taken.least) // weighed.kv.token_bytes, 0))


def _stage(sizes: ExpertSizes, *, room: int, dynamic: bool) -> StageBudget:
    """All layers as one stage."""
    return StageBudget(
        layers=sizes.identity.layers or (),
        row_bytes=sizes.row_bytes,
        num_experts=sizes.identity.num_experts or 0,
        budget_bytes=room,
        fixed_bytes=int(sizes.fixed_bytes.sum()),
        swap_rows=(sizes.identity.top_k or 0) if dynamic else 0,
    )


def _kv_range(weighed: Weighed, *, load: Load) -> Range:
    """The cache that is asked for; layers that are not known make it open above."""
    known = weighed.kv.sequence_bytes(load.context) * load.concurrency
    return Range(least=known, most=None if weighed.kv.unknown else known)


def _heads_findings(weighed: Weighed, *, machine: Machine) -> list[Finding]:
    """Ranks share attention heads out evenly, or not at all."""
    if weighed.num_heads is None or weighed.num_heads % machine.num_gpus == 0:
        return []
    text = (
        f"{weighed.num_heads} attention heads cannot be shared out evenly over {machine.num_gpus} GPUs, as vLLM demands: "
        "use a number of GPUs that divides them"
    )
    return [Finding(name="heads", binds=True, text=text)]


def _vram_findings(
    weighed: Weighed, *, best: Placement | None, room: int, machine: Machine, load: Load
) -> list[Finding]:
    """Even at the lower end of ranges, the fewest hot rows do not fit."""
    if best is not None:
        return []
    stage = _stage(weighed.sizes, room=0, dynamic=load.dynamic)
    short = stage.least_bytes - room
    cures = [f"{gib(machine.vram_bytes + short)} of memory per GPU"]
    tokens = kv_tokens(weighed, machine=machine, load=load)
    if tokens:
        cures.append(f"at most {tokens:,} tokens of KV cache in all (asked: {load.context * load.concurrency:,})")
    if load.dynamic and room >= int(weighed.sizes.fixed_bytes.sum()):
        cures.append("HOTSPLIT_DYNAMIC=0")
    if not weighed.kv.unknown and weighed.kv.dtype not in (None, "fp8") and weighed.kv.token_bytes:
        cures.append("--kv-dtype fp8")
    text = (
        f"GPU memory binds: {gib(short)} short on every GPU. The fewest hot rows take {gib(stage.least_bytes)}, dense "
        f"weights {gib(weighed.dense.least)}, the KV cache {gib(_kv_range(weighed, load=load).least)}, the reserve "
        f"{gib(load.reserve_bytes)}. It needs {', or '.join(cures)}, or more GPUs"
    )
    return [Finding(name="vram", binds=True, text=text)]


def _open_findings(
    weighed: Weighed, *, sure: Placement | None, best: Placement | None, sure_room: int | None
) -> list[Finding]:
    """What the ranges leave open."""
    unknown = [f"the KV cache is unknown: {reason}" for reason in weighed.kv.unknown]
    findings = [Finding(name="kv-unknown", binds=False, text=text, is_open=True) for text in unknown]
    if best is not None and sure is None and sure_room is not None:
        text = (
            f"whether it fits depends on how ranks share dense weights: {gib(weighed.dense.least)} to "
            f"{gib(weighed.dense.most or 0)} each"
        )
        findings.append(Finding(name="dense-open", binds=False, text=text, is_open=True))
    return findings


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostNeed:
    """Where cold rows lack most host memory."""

    node: int | None
    """NUMA node; None for the host as a whole."""
    cold_bytes: int
    """Of cold rows there."""
    ram_bytes: int
    """What there is."""
    reserve_bytes: int
    """Of it, left for everything else."""

    @property
    def short_bytes(self) -> int:
        """What lacks; below 0 where there is more than is needed."""
        return self.cold_bytes + self.reserve_bytes - self.ram_bytes

    def __str__(self) -> str:
        return "host memory" if self.node is None else f"memory of NUMA node {self.node}"


def _host_need(placement: Placement, *, machine: Machine, load: Load) -> _HostNeed:
    """The host's need, or that of its node that lacks most."""
    ram = machine.ram_bytes
    per_node = host_bytes(placement, machine=machine if len(ram) > 1 else replace(machine, nodes=None))
    reserve = load.ram_reserve_bytes // len(ram)
    node, cold = max(per_node.items(), key=lambda item: item[1] - ram[item[0] or 0])
    return _HostNeed(node=node, cold_bytes=cold, ram_bytes=ram[node or 0], reserve_bytes=reserve)


def _host_findings(
    weighed: Weighed, *, sure: Placement | None, best: Placement | None, machine: Machine, load: Load
) -> list[Finding]:
    """Cold rows that the host, or one of its nodes, cannot hold: at both ends of the ranges, or at one."""
    if best is not None and best.cold_bytes:
        need = _host_need(best, machine=machine, load=load)
        if need.short_bytes > 0:
            return [_short_host(weighed, best=best, need=need, load=load)]
    if best is None or sure is None or not sure.cold_bytes:
        return []
    need = _host_need(sure, machine=machine, load=load)
    if need.short_bytes <= 0:
        return []
    ranks = need.cold_bytes // sure.cold_bytes
    text = (
        f"whether {need} suffices depends on how ranks share dense weights: cold experts take "
        f"{gib(best.cold_bytes * ranks)} to {gib(need.cold_bytes)}, and there is {gib(need.ram_bytes - need.reserve_bytes)} "
        f"beside a reserve of {gib(need.reserve_bytes)}; {gib(need.short_bytes)} more of it makes it sure"
    )
    return [Finding(name="ram-open", binds=False, text=text, is_open=True)]


def _short_host(weighed: Weighed, *, best: Placement, need: _HostNeed, load: Load) -> Finding:
    """Even at the lower end: what lacks, and the ways out."""
    each = -(-need.short_bytes // (need.cold_bytes // best.cold_bytes))
    cures = [f"{gib(need.short_bytes)} more of it"]
    # no GPU can take more off the host than is cold: past that, the reserve is what lacks
    if each <= best.cold_bytes:
        cures.append(f"{gib(each)} more per GPU for hot rows")
        tokens = -(-each // (weighed.kv.token_bytes or 1))
        if weighed.kv.token_bytes and tokens <= load.context * load.concurrency:
            cures.append(f"{tokens:,} tokens of KV cache fewer")
    if need.ram_bytes < need.reserve_bytes:
        cures.append(f"a lower --ram-reserve-gib: {gib(need.ram_bytes)} are below the reserve itself")
    text = (
        f"{need} binds: cold experts take {gib(need.cold_bytes)}, {gib(need.short_bytes)} more than there "
        f"is beside a reserve of {gib(need.reserve_bytes)}. It needs {', or '.join(cures)}"
    )
    return Finding(name="ram", binds=True, text=text)


def _whole_findings(weighed: Weighed, *, sure: Placement | None) -> list[Finding]:
    """Nothing is cold: hotsplit has nothing to do."""
    if sure is None or sure.cold_bytes:
        return []
    text = f"every expert fits: {gib(weighed.sizes.expert_bytes)} of {gib(sure.room_bytes)}; run it without hotsplit"
    return [Finding(name="fits-whole", binds=False, text=text)]


def kv_tokens_per_gib(weighed: Weighed) -> int | None:
    """KV tokens that one GiB of hot rows costs.

    Args:
        weighed: The model.
    """
    if weighed.kv.unknown or not weighed.kv.token_bytes:
        return None
    return GIB // weighed.kv.token_bytes
