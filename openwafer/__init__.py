"""openwafer: an open wafer-scale AI cluster in software.

Start reading at `cli/main.py` (the commands) or `graph/unit.py` (the thing everything streams). From Python:

    import openwafer as ow
    with ow.deferred():  # no weight is allocated
        model = GPT(config)
    job = ow.Trainer(model, optimizer=ow.AdamW(lr=3e-4))
    job.fit(train_data, num_steps=1000)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openwafer.errors import UserError
    from openwafer.graph import capture
    from openwafer.graph.deferred import deferred
    from openwafer.memoryx.config import SGD, Adafactor, Adam, AdamW, GroupConfig, Lion, MemoryConfig
    from openwafer.train.cluster import Cluster
    from openwafer.train.schedule import ScheduleConfig
    from openwafer.train.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Cluster",
    "GroupConfig",
    "Lion",
    "MemoryConfig",
    "ScheduleConfig",
    "Trainer",
    "UserError",
    "capture",
    "deferred",
]

# Imported when used: `import openwafer` alone loads neither torch nor anything else.
_HOME = {
    "SGD": "memoryx.config",
    "Adafactor": "memoryx.config",
    "Adam": "memoryx.config",
    "AdamW": "memoryx.config",
    "Cluster": "train.cluster",
    "GroupConfig": "memoryx.config",
    "Lion": "memoryx.config",
    "MemoryConfig": "memoryx.config",
    "ScheduleConfig": "train.schedule",
    "Trainer": "train.trainer",
    "UserError": "errors",
    "capture": "graph",
    "deferred": "graph.deferred",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
