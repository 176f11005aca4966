"""A vLLM plugin for tests alone: it watches hotsplit from outside, by means of its own, in every worker.

Put this folder's parent on PYTHONPATH and vLLM loads the plugin beside hotsplit; without VLLM_PROBE_DIR it does
nothing. The product has no switch for any of this.

    VLLM_PROBE_DIR         folder for every rank's steps, one line each: rank0.jsonl
    VLLM_PROBE_EVERY       recompute every so many MoE calls from an unpermuted copy; 0, the default, never
    VLLM_PROBE_HUGE_PAGES  0: hot rows without huge pages, which make a hotsplit run faster than stock
    VLLM_PROBE_SAVE_S      save what was learned every so many seconds, not every few minutes
    VLLM_PROBE_GPU         a GPU's backend over stand-ins (gpu.py): "whole", or "deaf" for one that loses what is published

While it runs, `collective_rpc("hotsplit_probe", args=(command,))` reaches it in every worker (commands: commands.py).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

_watches: dict[int, Any] = {}
"""One per process: vLLM asks for plugins more than once."""


def register() -> None:
    """Called by vLLM in every process."""
    environ = os.environ  # noqa: TID251 - the probe's own variables
    folder = environ.get("VLLM_PROBE_DIR")
    if folder and os.getpid() not in _watches:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from hotsplit_probe.commands import run_command
        from hotsplit_probe.watch import Watch

        watch = _watches[os.getpid()] = Watch(Path(folder), every=int(environ.get("VLLM_PROBE_EVERY", "0")))
        if environ.get("VLLM_PROBE_HUGE_PAGES") == "0":
            _without_huge_pages()
        if "VLLM_PROBE_SAVE_S" in environ:
            _save_often(float(environ["VLLM_PROBE_SAVE_S"]))
        if "VLLM_PROBE_GPU" in environ:
            from hotsplit_probe.gpu import install

            install(writes_maps=environ["VLLM_PROBE_GPU"] == "whole")
        _before(WorkerWrapperBase, "init_device", lambda *_: watch.memory.start())
        _before(WorkerWrapperBase, "initialize_from_config", lambda *_: watch.memory.stop())
        _before(WorkerWrapperBase, "execute_model", lambda _, step: watch.begin_step(step))
        WorkerWrapperBase.hotsplit_probe = lambda _, command: run_command(watch, command)


def _before(owner: type, name: str, look: Any) -> None:
    """Let `look` see what a method is called with."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, watched)


def _without_huge_pages() -> None:
    from hotsplit.engines.vllm import session

    session.HUGE_PAGES = False


def _save_often(seconds: float) -> None:
    from hotsplit.bank import record
    from hotsplit.engines.vllm import session

    record.SAVE_EVERY_S = session.TELL_EVERY_S = seconds
