"""The door: vLLM calls register() in every process of its own, the API server, the engine core and each worker.

Off, and weightless, where no HOTSPLIT_ variable is set: nothing is imported, nothing changes.
"""

from __future__ import annotations

import os


def register() -> None:
    """Take part in vLLM, if any HOTSPLIT_ setting asks for it; calling it again changes nothing.

    Raises:
        ConfigError: A setting is unknown or not allowed.
        UnsupportedEngineError: This release of vLLM lacks a hook that hotsplit needs.
    """
    if not any(name.startswith("HOTSPLIT_") for name in os.environ):
        return
    from hotsplit.config import HotsplitConfig
    from hotsplit.errors import ConfigError

    try:
        is_on = HotsplitConfig.from_env(os.environ).is_on
    except ConfigError:
        # vLLM calls a plugin once per process, also where the call fails: a setting that is put right before the next
        # engine must find its hooks, or that engine would run stock without a word.
        _install()
        raise
    if is_on:
        _install()


def _install() -> None:
    from hotsplit.engines.vllm import hooks

    hooks.install(os.environ)
