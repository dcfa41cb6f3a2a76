"""Numbers written down as they come, one line of JSON each, so that a run that is cut off loses none."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self.numbers: dict[str, Any] = {}
        self.failed: list[str] = []

    def note(self, **numbers: Any) -> None:
        self.numbers |= numbers
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(numbers) + "\n")

    def part(self, name: str, work: Callable[[], object]) -> None:
        """Run a part; if it fails, say why and go on with the others."""
        began = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.failed.append(name)
            self.note(**{f"{name}_failed": f"{type(error).__name__}: {error}"[:2000]})
        took = time.perf_counter() - began
        self.note(**{f"{name}_seconds": round(took, 2)})
        print(f"-- {name}: {took:.1f} s{' FAILED' if name in self.failed else ''}", flush=True)


def read_journal(path: Path) -> dict[str, Any]:
    """All numbers that were noted; of equal names the last."""
    numbers: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        numbers |= json.loads(line)
    return numbers
