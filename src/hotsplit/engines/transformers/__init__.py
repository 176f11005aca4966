"""The transformers engine: the embedded default, on a CPU. `load` is all a user needs."""

from __future__ import annotations

from hotsplit.engines.transformers.engine import Engine
from hotsplit.engines.transformers.loading import load

__all__ = ["Engine", "load"]
