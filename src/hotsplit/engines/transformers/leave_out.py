"""Load a model without its routed experts.

transformers builds a model on the meta device and then materialises every parameter it has. An experts module whose
parameters are taken away right after its construction is therefore never read: the checkpoint's expert tensors become
names that nobody asked for. The classes are changed for the time of one load, under a lock, and put back whatever
happens; models that another thread makes at the same time keep their experts.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hotsplit.engines.transformers.index import ExpertsLayer, expert_parameters

MODEL_LOCK = threading.RLock()
"""Held while hotsplit makes a model. Classes and torch's default dtype are changed meanwhile, for the whole process."""


@contextmanager
def experts_left_out(
    model_class: type, *, experts_classes: Sequence[type], layers: Sequence[ExpertsLayer]
) -> Iterator[None]:
    """Within this context, models are made without routed experts.

    Args:
        model_class: The class whose from_pretrained will run.
        experts_classes: Classes of its experts modules.
        layers: Those modules; their names will not be reported as unexpected.
    """
    with MODEL_LOCK:
        constructors = {kind: kind.__init__ for kind in experts_classes}  # type: ignore[misc]
        own = vars(model_class).get("_keys_to_ignore_on_load_unexpected")
        had_own = "_keys_to_ignore_on_load_unexpected" in vars(model_class)
        inherited = getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or []
        names = [re.escape(layer.path) + r"\." for layer in layers]
        try:
            for kind, original in constructors.items():
                kind.__init__ = _without_experts(original)  # type: ignore[misc]
            model_class._keys_to_ignore_on_load_unexpected = [*inherited, *names]  # type: ignore[attr-defined]
            yield
        finally:
            for kind, original in constructors.items():
                kind.__init__ = original  # type: ignore[misc]
            if had_own:
                model_class._keys_to_ignore_on_load_unexpected = own  # type: ignore[attr-defined]
            else:
                del model_class._keys_to_ignore_on_load_unexpected  # type: ignore[attr-defined]


def _without_experts(original: Callable[..., None]) -> Callable[..., None]:
    """A constructor that takes the per-expert parameters away again, on the thread that asked for it."""
    owner = threading.get_ident()

    @functools.wraps(original)
    def construct(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if threading.get_ident() != owner:
            return
        for name in expert_parameters(self):
            self._parameters[name] = None
        # Otherwise the loader would initialise what is not there.
        self._is_hf_initialized = True  # type: ignore[assignment]

    return construct
