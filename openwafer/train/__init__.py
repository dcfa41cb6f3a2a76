"""Training: checkpoints, learning-rate schedules, metrics and the progress display.

Start at `checkpoint.py` (what survives a crash) or `schedule.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openwafer.checkpoint import Checkpoint, latest, save
    from openwafer.train.metrics import MetricsLog, StepMetrics
    from openwafer.train.progress import ProgressDisplay
    from openwafer.train.schedule import ScheduleConfig

__all__ = [
    "Checkpoint",
    "MetricsLog",
    "ProgressDisplay",
    "ScheduleConfig",
    "StepMetrics",
    "latest",
    "save",
]

_HOME = {
    "Checkpoint": "checkpoint",
    "MetricsLog": "metrics",
    "ProgressDisplay": "progress",
    "ScheduleConfig": "schedule",
    "StepMetrics": "metrics",
    "latest": "checkpoint",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
