"""What hotsplit does not serve under vLLM, each with its reason and the way out.

Checked in the process that builds vLLM's configuration, before a worker starts: its arguments first, since vLLM switches
some of them off by itself or fails without naming hotsplit's way out, and then what has become of them. What only a layer
can tell (a monolithic kernel, a quantisation that binds rows) is refused when the layer is built, with the same kind of
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hotsplit.errors import UnsupportedEngineError

LOAD_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "runai_streamer", "mistral", "instanttensor"}
)
"""vLLM load formats that read every expert through its expert map."""
REFUSED_CALLS = (
    "sleep",
    "wake_up",
    "discard",
    "reload_weights",
    "reset_weights",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "save_sharded_state",
    "save_tensorized_model",
)
"""Worker calls that would move or rewrite weights under hotsplit's rows, or save them in an order that is hotsplit's."""
DEVICES: Final = ("cpu", "cuda")
"""vLLM's device types that rows have a memory for."""
MAX_ROWS = 992
"""Most rows of a layer. vLLM's kernels pad the number of experts and want fewer than 1,024."""

SKIP_PADDING: Final = "VLLM_MOE_SKIP_PADDING"
"""vLLM's switch: with 0 its second model runner does not keep the padding mask of a step up to date."""

_STOCK = "unset the HOTSPLIT_ variables to run stock vLLM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One thing that is not served."""

    what: str
    """As the user asked for it."""
    why: str
    """Why it is not served."""
    do: str
    """The way out."""
    applies: Callable[[Any], bool]
    """Whether a vLLM configuration asks for it."""
    asked: Callable[[Any], bool] = lambda _: False
    """Whether vLLM's arguments do, where it may never come to a configuration that does."""


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        what="a model without routed experts",
        why="a dense model: there is nothing to split",
        do=_STOCK,
        applies=lambda config: not config.model_config.is_moe,
    ),
    Refusal(
        what="--enable-eplb",
        why="vLLM's load balancer moves experts between ranks itself",
        do="leave --enable-eplb out",
        applies=lambda config: config.parallel_config.enable_eplb,
        asked=lambda arguments: arguments.enable_eplb,
    ),
    Refusal(
        what="--enable-expert-parallel",
        why="experts are dealt out to ranks, and hotsplit plans shards of every expert on every rank",
        do="use tensor parallelism alone (leave --enable-expert-parallel out)",
        applies=lambda config: config.parallel_config.enable_expert_parallel,
    ),
    Refusal(
        what="--data-parallel-size above 1",
        why="replicas would need a plan and learned counts each",
        do="start one server per replica, each with a HOTSPLIT_STATE_DIR of its own",
        applies=lambda config: config.parallel_config.data_parallel_size > 1,
    ),
    Refusal(
        what="prefill context parallelism",
        why="ranks of one group would route different tokens",
        do="leave --prefill-context-parallel-size out",
        applies=lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        asked=lambda arguments: arguments.prefill_context_parallel_size > 1,
    ),
    Refusal(
        what="sequence-parallel MoE",
        why="ranks of one group would route different tokens",
        do="choose another all-to-all backend, or leave expert parallelism out",
        applies=lambda config: config.parallel_config.use_sequence_parallel_moe,
    ),
    Refusal(
        what="--enable-dbo or micro-batches",
        why="two halves of a step would be counted and published as one",
        do="leave --enable-dbo and --ubatch-size out",
        applies=lambda config: config.parallel_config.use_ubatching,
        asked=lambda arguments: arguments.enable_dbo or arguments.ubatch_size > 1,
    ),
    Refusal(
        what="--distributed-executor-backend ray",
        why="settings, ranges and metrics are tested with vLLM's multiprocessing executor alone",
        do="use --distributed-executor-backend mp",
        applies=lambda config: _is_ray(config.parallel_config.distributed_executor_backend),
        asked=lambda arguments: _is_ray(arguments.distributed_executor_backend),
    ),
    Refusal(
        what="--enable-lora",
        why="adapters of experts are not moved with their rows",
        do="merge the adapter into the checkpoint",
        applies=lambda config: config.lora_config is not None,
    ),
    Refusal(
        what="--enable-sleep-mode",
        why="sleeping takes the memory away from under the rows",
        do="leave --enable-sleep-mode out",
        applies=lambda config: config.model_config.enable_sleep_mode,
        asked=lambda arguments: arguments.enable_sleep_mode,
    ),
    Refusal(
        what="weight transfer",
        why="weights would be rewritten under the rows",
        do="leave the weight-transfer configuration out",
        applies=lambda config: getattr(config, "weight_transfer_config", None) is not None,
    ),
    Refusal(
        what="this --load-format",
        why="its loader does not read experts one by one through vLLM's expert map",
        do="use safetensors files and --load-format auto",
        applies=lambda config: str(config.load_config.load_format) not in LOAD_FORMATS,
    ),
    Refusal(
        what="no size for the KV cache",
        why="vLLM's CPU build would take all memory that it believes to be free, and count cold rows as used",
        do="set VLLM_CPU_KVCACHE_SPACE to whole GiB, or --kv-cache-memory-bytes",
        applies=lambda config: (
            config.device_config.device_type == "cpu" and config.cache_config.kv_cache_memory_bytes is None
        ),
    ),
    Refusal(
        what="a device other than the CPU and NVIDIA's GPUs",
        why="there is no backend for its memory",
        do="run vLLM's CPU build, or on an NVIDIA GPU (docs/vllm.md)",
        applies=lambda config: config.device_config.device_type not in DEVICES,
    ),
    Refusal(
        what="an AMD GPU",
        why="the memory of both kinds at one address is made with NVIDIA's driver, and was never tried on ROCm",
        do=_STOCK,
        applies=lambda config: config.device_config.device_type == "cuda" and torch.version.hip is not None,
    ),
)
"""In the order in which they are checked."""


def require_supported(vllm_config: Any) -> None:
    """Refuse the first thing that is not served.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        UnsupportedEngineError: What, why, and the way out.
    """
    _refuse(refusal for refusal in REFUSALS if refusal.applies(vllm_config))


def require_arguments(engine_args: Any) -> None:
    """Refuse the first thing that is asked for and not served, before vLLM makes a configuration of it.

    Args:
        engine_args: vLLM's EngineArgs.

    Raises:
        UnsupportedEngineError: What, why, and the way out.
    """
    _refuse(refusal for refusal in REFUSALS if refusal.asked(engine_args))


def require_environment(environ: Mapping[str, str], *, device_type: str) -> None:
    """Refuse a switch of vLLM's that is no part of its configuration.

    Args:
        environ: The process's environment.
        device_type: vLLM's.

    Raises:
        UnsupportedEngineError: Padding cannot be told from tokens: what, why, and the way out.
    """
    if device_type == "cuda" and environ.get(SKIP_PADDING, "1").strip() == "0":
        raise UnsupportedEngineError(
            f"{SKIP_PADDING}=0",
            got="a padding mask that vLLM leaves as it was when graphs were captured: every token would be padding",
            do=f"leave {SKIP_PADDING} out",
        )


def require_rows(num_rows: int) -> None:
    """Refuse more rows than vLLM's kernels take.

    Args:
        num_rows: Of a layer, R.

    Raises:
        UnsupportedEngineError: There are more.
    """
    if num_rows > MAX_ROWS:
        raise UnsupportedEngineError(
            "rows of a layer",
            got=f"{num_rows}",
            wanted=f"at most {MAX_ROWS}, which vLLM's kernels take",
            do=f"set HOTSPLIT_DYNAMIC=0 if the model has {MAX_ROWS} experts; else {_STOCK}",
        )


def require_modular(modules: Sequence[Any]) -> None:
    """Refuse kernels that turned out to route inside once post-processing had chosen them.

    Args:
        modules: vLLM's experts modules.

    Raises:
        UnsupportedEngineError: A monolithic one: it would never ask for rows.
    """
    for module in modules:
        if getattr(module.quant_method, "is_monolithic", False):
            raise UnsupportedEngineError(
                f"{module.layer_name}: {type(module.quant_method).__name__}",
                got="a monolithic kernel, which routes and computes in one",
                wanted="a kernel that takes the router's choice",
                do="choose another one with vLLM's --moe-backend (triton, cutlass or marlin, as the format allows)",
            )


def _refuse(refusals: Iterable[Refusal]) -> None:
    for refusal in refusals:
        raise UnsupportedEngineError(refusal.what, got=refusal.why, do=refusal.do)


def _is_ray(backend: object) -> bool:
    """The executor is a name or a class."""
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "")
    return "ray" in str(name).lower()
