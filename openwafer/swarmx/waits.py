"""What a rank spends its time on."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Waits:
    """What a worker spends its time on; filled by its port, read by heartbeats and reports."""

    doing: str = "starting"
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self, what: str, detail: str = "") -> Iterator[None]:
        before, self.doing = self.doing, f"waits for {what}{detail}"
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began
            self.doing = before

    def take(self) -> dict[str, float]:
        """Seconds waited since the last call, by what for."""
        taken, self.seconds = self.seconds, {}
        return taken

    def status(self) -> dict[str, Any]:
        return {"doing": self.doing}
