"""vLLM's own offload flags under hotsplit: they say how large the hot set may be, and hotsplit takes their place.

vLLM's offloader moves whole parameters, dense ones too, in the order of the layers. hotsplit reads how much that would
have kept on the device, keeps the dense weights there, and splits the experts by row instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from hotsplit.engines.vllm.budget import OffloadFlags

logger = logging.getLogger(__name__)

_FIELDS = {
    "offload_backend": "backend",
    "cpu_offload_gb": "cpu_offload_gb",
    "cpu_offload_params": "cpu_offload_params",
    "offload_group_size": "group_size",
    "offload_num_in_group": "num_in_group",
    "offload_prefetch_step": "prefetch_step",
    "offload_params": "params",
}
"""vLLM's argument -> field of OffloadFlags."""


@contextmanager
def taken_over(engine_args: Any) -> Iterator[dict[str, Any]]:
    """The offload flags as given; inside they are off, so that its own offloader never starts.

    Args:
        engine_args: vLLM's EngineArgs; as they were afterwards.

    Yields:
        Those that differ from vLLM's defaults, in JSON's own types.
    """
    defaults = {field.name: _default(field) for field in fields(engine_args) if field.name in _FIELDS}
    given = {name: value for name in defaults if (value := getattr(engine_args, name)) != defaults[name]}
    if given:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        logger.warning(
            "hotsplit takes over from vLLM's offloader: %s set the default hot budget, dense weights stay resident",
            listed,
        )
    try:
        for name in given:
            setattr(engine_args, name, defaults[name])
        yield {name: sorted(value) if isinstance(value, set) else value for name, value in sorted(given.items())}
    finally:
        for name, value in given.items():
            setattr(engine_args, name, value)


def as_flags(given: Mapping[str, Any]) -> OffloadFlags:
    """The flags as the budget wants them.

    Args:
        given: As taken_over() yields them.

    Raises:
        UnsupportedEngineError: A backend that hotsplit does not know.
    """
    sets = ("cpu_offload_params", "offload_params")
    values: dict[str, Any] = {
        _FIELDS[name]: frozenset(value) if name in sets else value for name, value in given.items()
    }
    return OffloadFlags(**values)


def _default(field: Any) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default
