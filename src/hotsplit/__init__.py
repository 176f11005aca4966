"""hotsplit: mixture-of-experts models whose experts do not all fit in fast memory.

The experts that the traffic uses live in fast memory, the others are read where they lie, and which is which follows
the traffic. Two lines run a model:

    model = hotsplit.load("path/or/hub-id", hot_gib=2)
    model.generate(...)

Names are imported when they are first used: `import hotsplit` loads neither torch nor an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hotsplit.version import __version__

if TYPE_CHECKING:
    from hotsplit.config import HotsplitConfig
    from hotsplit.engines.transformers import load
    from hotsplit.errors import (
        BankError,
        BudgetError,
        CheckpointError,
        ConfigError,
        EngineError,
        HistogramError,
        HotsplitError,
        PlanError,
        PlanMismatchError,
        RatesError,
        SwapError,
        TraceError,
        UnsupportedEngineError,
    )
    from hotsplit.plan.dialects import load_histogram
    from hotsplit.plan.histogram import Histogram
    from hotsplit.plan.planfile import Plan, load_plan

__all__ = [
    "BankError",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "Histogram",
    "HistogramError",
    "HotsplitConfig",
    "HotsplitError",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RatesError",
    "SwapError",
    "TraceError",
    "UnsupportedEngineError",
    "__version__",
    "load",
    "load_histogram",
    "load_plan",
]

_HOMES = {
    "Histogram": "hotsplit.plan.histogram",
    "HotsplitConfig": "hotsplit.config",
    "Plan": "hotsplit.plan.planfile",
    "load": "hotsplit.engines.transformers",
    "load_histogram": "hotsplit.plan.dialects",
    "load_plan": "hotsplit.plan.planfile",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use; every other public name is an error class."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "hotsplit.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
