"""Training: the definition of a step, the streamed engine that equals it, and runs around them.

Start at `reference.py` (what a step is), then `streamed.py`; `job.py` is `openwafer train`, `trainer.py` the
Python API.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openwafer.train.metrics import MetricsLog, StepMetrics
    from openwafer.train.progress import ProgressDisplay
    from openwafer.train.schedule import ScheduleConfig
    from openwafer.train.trainer import Trainer

__all__ = [
    "MetricsLog",
    "ProgressDisplay",
    "ScheduleConfig",
    "StepMetrics",
    "Trainer",
]

_HOME = {
    "MetricsLog": "metrics",
    "ProgressDisplay": "progress",
    "ScheduleConfig": "schedule",
    "StepMetrics": "metrics",
    "Trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
