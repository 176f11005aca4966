"""What a model with its experts elsewhere must not do quietly: be saved, copied or switched to another implementation."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from hotsplit.engines.transformers.engine import Engine
from hotsplit.errors import EngineError

logger = logging.getLogger(__name__)

_LOSES_EXPERTS = ("save_pretrained", "push_to_hub")


def guard(model: Any, *, engine: Engine) -> None:
    """Hang the handle on the model, block what would silently lose the experts, and close when the model goes.

    Args:
        model: The loaded model.
        engine: Its handle.
    """
    model.hotsplit = engine
    for module in model.modules():
        for name in _LOSES_EXPERTS:
            if hasattr(module, name):
                setattr(module, name, _refusal(name, do="copy the model folder instead"))
    model.set_experts_implementation = _refusal(
        "set_experts_implementation", do="load the model with stock transformers"
    )
    model.register_state_dict_pre_hook(_warn_of_state_dict)
    weakref.finalize(model, engine.close)


def _refusal(name: str, *, do: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise EngineError(name, got="a model whose routed experts are not among its weights", do=do)

    return refuse


def _warn_of_state_dict(*_args: object) -> None:
    logger.warning("a hotsplit model's state_dict() has no routed experts: they are not among its weights")
