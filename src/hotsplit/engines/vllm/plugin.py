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

    config = HotsplitConfig.from_env(os.environ)
    if config.is_on:
        from hotsplit.engines.vllm import hooks

        hooks.install(config, environ=os.environ)
