"""Where hotsplit takes part in vLLM: everything that is replaced or wrapped, in one place.

    PluggableLayer.register_oot          the experts class and every subclass: vLLM's own way to replace a layer
    EngineArgs.create_engine_config      settings travel with vLLM's configuration; what cannot be served is refused
    WorkerWrapperBase.load_model         plan and ranges before, banks after
    WorkerWrapperBase.determine_available_memory, .initialize_from_config, .compile_or_warm_up_model
                                         what is left for the KV cache, and whether the reserve has been kept
    WorkerWrapperBase.execute_model      one step
    WorkerWrapperBase.shutdown           save

No file of vLLM is changed; the wraps are of classes in this process.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from hotsplit.bank.runs import new_run_dir
from hotsplit.config import HotsplitConfig
from hotsplit.engines.vllm import experts, exposition, offload, planning, refusals, releases, route_op, settings
from hotsplit.engines.vllm import session as sessions
from hotsplit.errors import EngineError

RUN_DIR = "_HOTSPLIT_RUN_DIR"
"""Variable that hands the run's folder to child processes. Not a setting: it differs from start to start."""
SHUTDOWN_S = 10
"""Seconds that a server may take to shut down where vLLM's own setting gives it none."""
_INSTALLED = "hotsplit_installed"


def install(environ: MutableMapping[str, str]) -> None:
    """Put hotsplit into this process's vLLM; once, however often it is called.

    Settings are read anew for every engine: a process may start several.

    Args:
        environ: The process's environment, which child processes inherit.

    Raises:
        UnsupportedEngineError: This release of vLLM lacks a hook that hotsplit needs.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(WorkerWrapperBase, _INSTALLED):
        return
    # vLLM configures logging for its own name alone; under it our lines go where its lines go.
    logging.getLogger("hotsplit").parent = logging.getLogger("vllm")
    for notice in releases.check_hooks(releases.vllm_version()):
        logging.getLogger(__name__).warning("hotsplit: %s", notice)
    setattr(WorkerWrapperBase, _INSTALLED, True)
    route_op.define(_route)
    experts.cover_all(RoutedExperts, register_oot=PluggableLayer.register_oot)
    _wrap_engine_args(EngineArgs, environ=environ)
    _wrap_worker(WorkerWrapperBase, environ=environ)


def _route(topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return sessions.required().route(topk_ids, layer_name)


def _wrap_engine_args(engine_args: Any, *, environ: MutableMapping[str, str]) -> None:
    stock = engine_args.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = HotsplitConfig.from_env(environ)
        if not config.is_on:
            self.additional_config = {
                name: self.additional_config[name] for name in {*self.additional_config} - {settings.KEY}
            }
            return stock(self, *args, **kwargs)
        refusals.require_arguments(self)
        run_dir = _run_dir(config, environ=environ)
        with offload.taken_over(self) as flags:
            mine = {settings.KEY: settings.to_additional(config, offload=flags)}
            self.additional_config = {**self.additional_config, **mine}
            vllm_config = stock(self, *args, **kwargs)
        refusals.require_supported(vllm_config)
        refusals.require_environment(environ, device_type=str(vllm_config.device_config.device_type))
        planning.precheck(vllm_config)
        _grant_time_to_save(vllm_config)
        exposition.expose(Path(run_dir))
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def _run_dir(config: HotsplitConfig, *, environ: MutableMapping[str, str]) -> str:
    """The folder for this engine's snapshots: a new one, but in vLLM's own children, which are of the same engine."""
    if multiprocessing.parent_process() is None or RUN_DIR not in environ:
        environ[RUN_DIR] = str(new_run_dir(config.state_path))
    return environ[RUN_DIR]


def _grant_time_to_save(vllm_config: Any) -> None:
    """Workers are killed where they stand unless they are given time: what was learned since the last save goes."""
    if getattr(vllm_config, "shutdown_timeout", None) == 0:
        vllm_config.shutdown_timeout = SHUTDOWN_S
        text = "hotsplit: the server may take up to %d s to shut down (--shutdown-timeout), to save what was learned"
        logging.getLogger(__name__).info(text, SHUTDOWN_S)


def _wrap_worker(worker: Any, *, environ: MutableMapping[str, str]) -> None:
    """A worker's life: its start, its steps, its end."""
    wrapped = (*_wrapped_start(worker.initialize_from_config, environ=environ), *_wrapped_run(worker))
    for method in wrapped:
        setattr(worker, method.__name__, method)
    for name in refusals.REFUSED_CALLS:
        setattr(worker, name, _refused_call(name))


def _wrapped_start(stock_initialize: Any, *, environ: MutableMapping[str, str]) -> tuple[Any, ...]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model, with experts hot and cold."""
        prepared = None
        if _is_asked(self.vllm_config, environ=environ):
            prepared = planning.prepare(self.vllm_config, run_dir=environ.get(RUN_DIR))
        with sessions.begin(prepared).loading():
            return self.worker.load_model(*args, **kwargs)

    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Let vLLM profile a step, then see what it has found for its KV cache."""
        num_bytes = self.worker.determine_available_memory(*args, **kwargs)
        session = sessions.required()
        with session.closed_on_error():
            session.memory_watch.look_at_kv_cache(num_bytes, vllm_config=self.vllm_config)
        return num_bytes

    @functools.wraps(stock_initialize)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        with sessions.required().memory_watch.making_kv_cache():
            return stock_initialize(self, *args, **kwargs)

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Warm up, then see whether the reserve has been kept."""
        result = self.worker.compile_or_warm_up_model(*args, **kwargs)
        session = sessions.required()
        with session.closed_on_error():
            session.memory_watch.require_reserve()
        return result

    return load_model, determine_available_memory, initialize_from_config, compile_or_warm_up_model


def _wrapped_run(worker: Any) -> tuple[Any, ...]:
    stock_execute, stock_shutdown = worker.execute_model, worker.shutdown

    @functools.wraps(stock_execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with sessions.required().step(scheduler_output):
            return stock_execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(stock_shutdown)
    def shutdown(self: Any) -> Any:
        session = sessions.current()
        if session is not None:
            session.close()
        return stock_shutdown(self)

    return execute_model, shutdown


def _is_asked(vllm_config: Any, *, environ: MutableMapping[str, str]) -> bool:
    """Whether this worker's engine runs with hotsplit: not where its settings have gone since an earlier engine's."""
    additional = vllm_config.additional_config
    travelled = isinstance(additional, Mapping) and settings.KEY in additional
    return travelled or HotsplitConfig.from_env(environ).is_on


def _refused_call(name: str) -> Any:
    """A worker call that would take weights away from under the banks."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        if session is None or session.is_stock:
            return getattr(self.worker, name)(*args, **kwargs)
        raise EngineError(
            f"{name}()",
            got="a call that moves, rewrites or saves weights whose rows are hotsplit's",
            do="restart the server instead, or run it without hotsplit",
        )

    refused.__name__ = name
    return refused
