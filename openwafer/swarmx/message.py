"""What ranks say to each other: a kind, a few JSON values, and tensors. Never pickle."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Message:
    """One message; `tensors` are copied into it and out of it."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encoded(self) -> bytes:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        specs = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in kept.items()]
        head = json.dumps({"kind": self.kind, "fields": self.fields, "tensors": specs}).encode()
        payloads = [t.reshape(-1).view(torch.uint8).numpy().data for t in kept.values()]
        return b"".join([_LENGTH.pack(len(head)), head, *payloads])

    @classmethod
    def decoded(cls, data: bytes) -> "Message":
        (length,) = _LENGTH.unpack_from(data)
        position = _LENGTH.size + length
        head = json.loads(data[_LENGTH.size : position])
        tensors: dict[str, Tensor] = {}
        for name, dtype_name, shape in head["tensors"]:
            dtype = getattr(torch, dtype_name)
            tensor = torch.empty(shape, dtype=dtype)
            raw = tensor.reshape(-1).view(torch.uint8)
            raw.numpy().data[:] = data[position : position + raw.numel()]
            position += raw.numel()
            tensors[name] = tensor
        return cls(head["kind"], head["fields"], tensors)
