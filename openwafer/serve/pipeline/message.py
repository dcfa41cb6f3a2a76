"""What goes from stage to stage, and from the last one back to the engine. Never pickle."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openwafer.serve.runner import Batch, Draw, Drawn

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """A batch on its way: `x` is the residual stream (None before the first stage), `busy_s` what stages have said."""

    batch: Batch
    draws: Sequence[Draw | None]
    x: np.ndarray | None
    busy_s: tuple[float, ...] = ()

    def encoded(self) -> list[Any]:
        batch = self.batch
        arrays = [batch.tokens, batch.positions, batch.sequences, batch.tables, batch.logit_rows]
        fields = {
            "draws": [None if d is None else [d.temperature, d.top_k, d.top_p, d.min_p, d.uniform] for d in self.draws],
            "busy_s": self.busy_s,
        }
        return _packed(fields, arrays if self.x is None else [*arrays, self.x])

    @classmethod
    def decoded(cls, message: memoryview) -> "Work":
        fields, arrays = _unpacked(message)
        names = ("tokens", "positions", "sequences", "tables", "logit_rows")
        draws = [
            None if d is None else Draw(temperature=d[0], top_k=d[1], top_p=d[2], min_p=d[3], uniform=d[4])
            for d in fields["draws"]
        ]
        return cls(
            batch=Batch(**dict(zip(names, arrays, strict=False))),
            draws=draws,
            x=arrays[5] if len(arrays) > 5 else None,
            busy_s=tuple(fields["busy_s"]),
        )


def encoded_result(drawn: Drawn, busy_s: Sequence[float]) -> list[Any]:
    return _packed({"busy_s": busy_s}, [drawn.tokens, drawn.tops, drawn.logits])


def decoded_result(message: memoryview) -> tuple[Drawn, tuple[float, ...]]:
    fields, (tokens, tops, logits) = _unpacked(message)
    return Drawn(tokens=tokens, tops=tops, logits=logits), tuple(fields["busy_s"])


def _packed(fields: dict[str, Any], arrays: Sequence[np.ndarray]) -> list[Any]:
    """A JSON head, filled up so that what follows lies at a multiple of 8, and the arrays."""
    fields["arrays"] = [[array.dtype.str, array.shape] for array in arrays]
    head = json.dumps(fields).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % 8)
    parts: list[Any] = [_LENGTH.pack(len(head)) + head]
    for array in arrays:
        parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8), b"\0" * (-array.nbytes % 8)]
    return parts


def _unpacked(message: memoryview) -> tuple[dict[str, Any], list[np.ndarray]]:
    (length,) = _LENGTH.unpack_from(message)
    at = _LENGTH.size + length
    fields = json.loads(bytes(message[_LENGTH.size : at]))
    arrays: list[np.ndarray] = []
    for kind, shape in fields["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(message, np.dtype(kind), count, at).reshape(shape)
        arrays.append(array)
        at += -(-array.nbytes // 8) * 8
    return fields, arrays
