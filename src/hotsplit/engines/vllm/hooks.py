"""Where hotsplit takes part in vLLM: everything that is replaced or wrapped, in one place.

    PluggableLayer.register_oot          the experts class and every subclass: vLLM's own way to replace a layer
    EngineArgs.create_engine_config      settings travel with vLLM's configuration; what cannot be served is refused
    WorkerWrapperBase.load_model         plan and ranges before, banks after
    WorkerWrapperBase.execute_model      one step
    WorkerWrapperBase.shutdown           save

No file of vLLM is changed; the wraps are of classes in this process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
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
_INSTALLED = "hotsplit_installed"


def install(config: HotsplitConfig, *, environ: MutableMapping[str, str]) -> None:
    """Put hotsplit into this process's vLLM; once, however often it is called.

    Args:
        config: All settings, on.
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
    _wrap_engine_args(EngineArgs, config=config, environ=environ)
    _wrap_worker(WorkerWrapperBase, environ=environ)


def _route(topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return sessions.required().route(topk_ids, layer_name)


def _wrap_engine_args(engine_args: Any, *, config: HotsplitConfig, environ: MutableMapping[str, str]) -> None:
    stock = engine_args.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        refusals.require_arguments(self)
        run_dir = environ.setdefault(RUN_DIR, str(new_run_dir(config.state_path)))
        with offload.taken_over(self) as flags:
            mine = {settings.KEY: settings.to_additional(config, offload=flags)}
            self.additional_config = {**self.additional_config, **mine}
            vllm_config = stock(self, *args, **kwargs)
        refusals.require_supported(vllm_config)
        exposition.expose(Path(run_dir))
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def _wrap_worker(worker: Any, *, environ: MutableMapping[str, str]) -> None:
    stock_execute, stock_shutdown = worker.execute_model, worker.shutdown

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model, with experts hot and cold."""
        prepared = planning.prepare(self.vllm_config, run_dir=environ.get(RUN_DIR))
        with sessions.begin(prepared).loading():
            return self.worker.load_model(*args, **kwargs)

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Warm up, then see whether the reserve has been kept."""
        result = self.worker.compile_or_warm_up_model(*args, **kwargs)
        sessions.required().require_reserve()
        return result

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

    for wrapped in (load_model, compile_or_warm_up_model, execute_model, shutdown):
        setattr(worker, wrapped.__name__, wrapped)
    for name in refusals.REFUSED_CALLS:
        setattr(worker, name, _refused_call(name))


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
