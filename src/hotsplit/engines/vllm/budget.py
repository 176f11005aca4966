"""How much fast memory hot experts get in vLLM, where nobody says: what its own placement would have kept there.

Stands before the plan: `vLLM's flags + weight bytes + memory -> hot budget, and one line that says how it came about`.
With offload flags it plays vLLM's offloader through, parameter by parameter: that one also moves dense weights, which
hotsplit leaves on the GPU, so their bytes come off the experts' share. Without, it is what reserve, KV cache and dense
weights leave. Pure: names and numbers in, numbers out; hotsplit replaces that offloader for experts and runs none.

Worked example, 10 layers of 1 GiB attention and 4 GiB experts under `--cpu-offload-gb 8`. UVA moves whole parameters in
order until 8 GiB are reached: layer 0 (5 GiB), and in layer 1 the attention (6) and the experts (10). So 40 GiB of
experts become a budget of 30:

    >>> attention = Parameter(name="self_attn.qkv_proj.weight", num_bytes=2**30, is_expert=False)
    >>> experts = Parameter(name="mlp.experts.w13_weight", num_bytes=4 * 2**30, is_expert=True)
    >>> resident_expert_bytes([[attention, experts]] * 10, flags=OffloadFlags(cpu_offload_gb=8)) // 2**30
    30
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hotsplit.errors import BudgetError, UnsupportedEngineError
from hotsplit.units import GIB, gib

OffloadKind = Literal["uva", "prefetch"]

_BACKENDS: Final = ("auto", "uva", "prefetch")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadFlags:
    """What the user told vLLM to keep off the GPU: the fields of its offload configuration.

    Raises:
        UnsupportedEngineError: A backend that this release of hotsplit does not know.
    """

    backend: str = "auto"
    """--offload-backend: "auto", "uva" or "prefetch"."""
    cpu_offload_gb: float = 0.0
    """--cpu-offload-gb: GiB per GPU, for UVA."""
    cpu_offload_params: frozenset[str] = frozenset()
    """--cpu-offload-params: name segments that UVA may move; none for all."""
    group_size: int = 0
    """--offload-group-size: layers in a group, for prefetch; 0 is off."""
    num_in_group: int = 1
    """--offload-num-in-group: the last layers of each group that are moved."""
    prefetch_step: int = 1
    """--offload-prefetch-step: layers fetched ahead, each with a buffer in GPU memory."""
    params: frozenset[str] = frozenset()
    """--offload-params: name segments that prefetch may move; none for all."""

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise UnsupportedEngineError(
                "vLLM's --offload-backend",
                got=repr(self.backend),
                wanted=f"one of {', '.join(_BACKENDS)}",
                do="set HOTSPLIT_HOT_GIB and leave the offload flags out",
            )

    @property
    def kind(self) -> OffloadKind | None:
        """The offloader that vLLM would run; None for none."""
        if self.backend == "prefetch" or (self.backend == "auto" and self.group_size > 0):
            return "prefetch"
        return "uva" if self.cpu_offload_gb > 0 else None

    @property
    def limit_bytes(self) -> int:
        """Where UVA stops."""
        return int(self.cpu_offload_gb * GIB)

    def __str__(self) -> str:
        if self.kind == "prefetch":
            return f"--offload-group-size {self.group_size} --offload-num-in-group {self.num_in_group}"
        return f"--cpu-offload-gb {self.cpu_offload_gb:g}" if self.kind == "uva" else "no offload flag"


def from_vllm_config(vllm_config: Any) -> OffloadFlags:
    """The flags as vLLM holds them.

    Args:
        vllm_config: vLLM's VllmConfig.

    Raises:
        UnsupportedEngineError: Its offload configuration has other fields than those of the tested releases.
    """
    try:
        offload = vllm_config.offload_config
        uva, prefetch = offload.uva, offload.prefetch
        return OffloadFlags(
            backend=str(offload.offload_backend),
            cpu_offload_gb=float(uva.cpu_offload_gb),
            cpu_offload_params=frozenset(uva.cpu_offload_params),
            group_size=int(prefetch.offload_group_size),
            num_in_group=int(prefetch.offload_num_in_group),
            prefetch_step=int(prefetch.offload_prefetch_step),
            params=frozenset(prefetch.offload_params),
        )
    except AttributeError as error:
        raise UnsupportedEngineError(
            "vLLM's offload configuration",
            got=f"no field {error.name!r}",
            wanted="the fields of the tested releases",
            do="set HOTSPLIT_HOT_GIB",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One whole parameter, as vLLM makes it on one rank."""

    name: str
    """Inside its decoder layer ("mlp.experts.routed_experts.w13_weight"); in a tower, with the tower's name before."""
    num_bytes: int
    """Of the whole tensor: all experts of the layer, for an expert weight."""
    is_expert: bool
    """Whether it belongs to routed experts."""


def resident_expert_bytes(layers: Sequence[Sequence[Parameter]], *, flags: OffloadFlags) -> int:
    """What hotsplit may keep hot: the weight bytes that vLLM's placement keeps on the GPU, less the dense ones.

    What lies outside the decoder layers (embeddings, output head) is on the GPU either way and cancels out.

    Args:
        layers: Every module that vLLM's offloader is shown, in its order, with its parameters in theirs: the decoder
            layers of this rank; for UVA also vision or audio towers, where vLLM makes them.
        flags: The user's.

    Returns:
        Bytes, from 0 (more was moved than there are expert bytes) to all expert bytes.
    """
    expert_bytes = sum(parameter.num_bytes for layer in layers for parameter in layer if parameter.is_expert)
    return min(max(expert_bytes - freed_bytes(layers, flags=flags), 0), expert_bytes)


def freed_bytes(layers: Sequence[Sequence[Parameter]], *, flags: OffloadFlags) -> int:
    """GPU memory that vLLM's offloader frees: what it moves to the host, less the buffers that it fetches into.

    Args:
        layers: As in resident_expert_bytes().
        flags: The user's.

    Returns:
        Bytes; negative where the buffers take more than was moved.
    """
    if flags.kind == "uva":
        return sum(parameter.num_bytes for parameter in _moved_by_uva(layers, flags=flags))
    if flags.kind == "prefetch":
        moved = list(_moved_by_prefetch(layers, flags=flags))
        # One buffer per layer fetched ahead and kind of parameter; parameters of one name share it from layer to layer.
        buffers = {(parameter.name, parameter.num_bytes) for parameter in moved}
        return sum(parameter.num_bytes for parameter in moved) - flags.prefetch_step * sum(size for _, size in buffers)
    return 0


def _moved_by_uva(layers: Sequence[Sequence[Parameter]], *, flags: OffloadFlags) -> Iterator[Parameter]:
    """Whole parameters, in order, until the limit is reached: the last one may go over it.

    Source: vLLM 0.32, model_executor/offloader/uva.py (Apache-2.0), the rule alone.
    """
    moved_bytes = 0
    for layer in layers:
        for parameter in layer:
            if moved_bytes >= flags.limit_bytes:
                return
            if _matches(parameter.name, flags.cpu_offload_params):
                moved_bytes += parameter.num_bytes
                yield parameter


def _moved_by_prefetch(layers: Sequence[Sequence[Parameter]], *, flags: OffloadFlags) -> Iterator[Parameter]:
    """The last layers of every group.

    Source: vLLM 0.32, model_executor/offloader/prefetch.py (Apache-2.0), the rule alone.
    """
    for index, layer in enumerate(layers):
        if index % flags.group_size >= flags.group_size - flags.num_in_group:
            yield from (parameter for parameter in layer if _matches(parameter.name, flags.params))


def _matches(name: str, segments: frozenset[str]) -> bool:
    """Whole segments only: "experts.w2_weight" is in "mlp.experts.w2_weight", not in "mlp.experts.w2_weight_scale"."""
    return not segments or any(f".{segment}." in f".{name}." for segment in segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class FastMemory:
    """Where hot experts will lie, and what else goes there, on one rank."""

    available_bytes: int
    """What vLLM may take: on a GPU its total times the utilization asked for, on a CPU what is free."""
    source: str
    """What that is, in words ("0.9 x 141 GiB of GPU memory")."""
    reserve_bytes: int
    """HOTSPLIT_VRAM_RESERVE_GIB."""
    kv_cache_bytes: int
    """KV cache asked for."""
    dense_bytes: int
    """Weights other than routed experts."""
    is_gpu: bool
    """Whether vLLM's offloaders act: they pass over parameters that lie in host memory already."""
    activation_bytes: int = 0
    """What a step takes at its peak, as far as it can be told before one has run."""
    kv_cache_source: str = ""
    """Where kv_cache_bytes comes from, unless it was asked for ("one request of 32768 tokens")."""

    def __post_init__(self) -> None:
        for name in ("available_bytes", "reserve_bytes", "kv_cache_bytes", "dense_bytes", "activation_bytes"):
            if getattr(self, name) < 0:
                raise BudgetError(f"the default hot budget, {name}", got=str(getattr(self, name)), wanted="bytes >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultBudget:
    """The budget, and why."""

    num_bytes: int
    """Bytes; what exceeds the model's experts is for the caller to cap."""
    text: str
    """How it came about, for the log."""


def default_hot_bytes_vllm(
    memory: FastMemory, *, flags: OffloadFlags, layers: Sequence[Sequence[Parameter]] = ()
) -> DefaultBudget:
    """The hot budget of one rank where HOTSPLIT_HOT_GIB is empty.

    Args:
        memory: What there is, and what else goes there.
        flags: vLLM's offload flags.
        layers: As in resident_expert_bytes(); looked at only where the flags act.

    Raises:
        BudgetError: The flags act and no parameter was named.
    """
    if flags.kind is not None and memory.is_gpu:
        return _as_offloaded(layers, flags=flags)
    left = memory.available_bytes - memory.reserve_bytes - memory.kv_cache_bytes - memory.dense_bytes
    left -= memory.activation_bytes
    because = f" ({memory.kv_cache_source})" if memory.kv_cache_source else ""
    text = (
        f"{gib(memory.available_bytes)} ({memory.source}) - {gib(memory.reserve_bytes)} reserve - "
        f"{gib(memory.kv_cache_bytes)} KV cache{because} - {gib(memory.dense_bytes)} dense weights"
    )
    if memory.activation_bytes:
        text += f" - about {gib(memory.activation_bytes)} for activations"
    if left < 0:
        text += ": nothing is left for hot experts"
    if flags.kind is not None:
        text += f"; vLLM ignores {flags} on a CPU"
    return DefaultBudget(num_bytes=max(left, 0), text=text)


def _as_offloaded(layers: Sequence[Sequence[Parameter]], *, flags: OffloadFlags) -> DefaultBudget:
    expert_bytes = sum(parameter.num_bytes for layer in layers for parameter in layer if parameter.is_expert)
    if not expert_bytes:
        raise BudgetError("the default hot budget", got=f"{flags} and no expert parameter", do="set HOTSPLIT_HOT_GIB")
    num_bytes = resident_expert_bytes(layers, flags=flags)
    moved = gib(freed_bytes(layers, flags=flags))
    text = (
        f"{gib(expert_bytes)} of routed experts - {moved} that vLLM's {flags.kind} offloader would free ({flags}); "
        "dense weights stay on the GPU"
    )
    return DefaultBudget(num_bytes=num_bytes, text=text)
