"""metrics.jsonl: one JSON object per step, readable while the run goes on."""

import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openwafer.errors import UserError
from openwafer.swarmx.report import CsxReport


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a step was like. `step`: updates done, this one included. `time`: seconds since the epoch."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens_per_s: float
    time: float
    skipped: bool = False  # its loss or gradients were not finite: nothing was changed
    eval_loss: float | None = None  # on held-out text, at the steps that evaluate
    step_s: float | None = None  # how long it took
    spent_s: dict[str, float] | None = None  # seconds of it by what it waited for (`timeline.py`)
    broadcast_bytes: int | None = None  # weights sent to all workers, where there is more than one
    reduced_bytes: int | None = None  # gradients that came from all workers
    csx: tuple[CsxReport, ...] | None = None  # each worker


class MetricsLog:
    """Appends to MODEL_DIR/metrics.jsonl."""

    def __init__(self, model_dir: Path, resumed_step: int = 0):
        """Records beyond `resumed_step` (0: a new run) belong to steps that will be done again: dropped."""
        self.path = model_dir / "metrics.jsonl"
        try:
            model_dir.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error}") from None
        try:
            os.ftruncate(self._descriptor, _end_of_step(self.path, resumed_step))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, metrics: StepMetrics) -> None:
        """Append one record in one write. Values that JSON cannot hold (NaN, infinity) become null."""
        record = {key: _finite(value) for key, value in asdict(metrics).items()}
        line = (json.dumps(record) + "\n").encode()
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error}; earlier checkpoints are intact: the same command resumes"
            ) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file; a torn last line (a run was killed) is left out."""
    return [record for record, _ in _records(path)]


def _end_of_step(path: Path, step: int) -> int:
    """How many bytes of the file hold the records up to `step`."""
    end = 0
    for record, position in _records(path):
        if record["step"] > step:
            break
        end = position
    return end


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each record with the position after it."""
    position = 0
    with path.open("rb") as file:
        lines = iter(enumerate(file, start=1))
        for number, line in lines:
            position += len(line)
            record = _parsed(line)
            if record is not None:
                yield record, position
            elif next(lines, None) is not None:
                raise UserError(f"{path} line {number} is not a metrics record: repair or remove the file")


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
