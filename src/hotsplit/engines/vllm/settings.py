"""How settings reach the workers: through vLLM's own additional_config, which travels wherever its configuration does.

vLLM hashes additional_config into its compile-cache key. So nothing may stand in it that differs from start to start
(no process id, no folder of the run, no learned counts), and what changes compiled code must: the settings, hotsplit's
version, and, once a worker has planned, the numbers of rows.

    {"hotsplit": {"version": "0.1.0", "environment": {"HOTSPLIT_HOT_GIB": "40"}, "offload": {}, "rows": "129x48"}}
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hotsplit.config import HotsplitConfig, as_written, settings
from hotsplit.errors import EngineError
from hotsplit.version import __version__

KEY = "hotsplit"
"""In additional_config."""


def to_additional(config: HotsplitConfig, *, offload: Mapping[str, Any]) -> dict[str, Any]:
    """What is put into additional_config.

    Args:
        config: All settings.
        offload: vLLM's own offload flags, which hotsplit takes over.
    """
    given = [info for info in settings() if config.origin(info.name) != "default"]
    written = {info.variable: as_written(getattr(config, info.name)) for info in given}
    return {"version": __version__, "environment": written, "offload": dict(offload)}


def from_additional(additional: object) -> tuple[HotsplitConfig, dict[str, Any]]:
    """The settings of this worker, and vLLM's offload flags.

    Args:
        additional: vllm_config.additional_config.

    Raises:
        EngineError: There are none, or they are of another version of hotsplit: running stock would be silent.
        ConfigError: A value is not allowed.
    """
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if not isinstance(found, Mapping):
        raise EngineError(
            "hotsplit is on in this worker, but its settings have not come with vLLM's configuration",
            got=f"additional_config without {KEY!r}",
            do="set the same HOTSPLIT_ variables on every node, and start vLLM through its own command or LLM class",
        )
    if found.get("version") != __version__:
        raise EngineError(
            "hotsplit of this worker",
            got=f"version {__version__}",
            wanted=f"{found.get('version')}, as the process that started it has",
            do="install the same version on every node",
        )
    return HotsplitConfig.from_env(dict(found["environment"])), dict(found["offload"])


def rows_text(num_rows: Sequence[int]) -> str:
    """Numbers of rows, short: what compiled code depends on.

    Args:
        num_rows: Of every layer.

    >>> rows_text([129, 129, 128])
    '129x2 128x1'
    """
    return " ".join(f"{rows}x{len(list(group))}" for rows, group in itertools.groupby(num_rows))
