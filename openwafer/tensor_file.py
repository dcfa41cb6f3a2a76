"""Writes one safetensors file at the rate of the disk: direct I/O, hashed on the way, in bounded memory."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openwafer.direct_io import aligned_bytes, bytes_of, opened, rounded_up, write_fully

CHUNK_BYTES = 4 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, direct: bool) -> str:
    """Write contiguous CPU tensors to a new file, have it on disk, and return its SHA-256."""
    # Wide types first: every tensor then starts at a multiple of its own element.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(path, flags, direct=direct) as descriptor, ThreadPoolExecutor(1) as writer:
        chunks = [aligned_bytes(CHUNK_BYTES) for _ in range(2)]
        writes: list[Future[None] | None] = [None, None]
        offset = 0
        for turn, parts in enumerate(_chunked(_pieces(ordered))):
            earlier = writes[turn % 2]
            if earlier is not None:
                earlier.result()
            memory = bytes_of(chunks[turn % 2])
            length = 0
            for part in parts:
                memory[length : length + len(part)] = part
                length += len(part)
            whole = rounded_up(length)  # the last one: what is too much is cut off below
            writes[turn % 2] = writer.submit(write_fully, descriptor, memory[:whole], offset)
            digest.update(memory[:length])  # while it is being written
            offset += length
        for write in writes:
            if write is not None:
                write.result()
        os.ftruncate(descriptor, offset)
        os.fsync(descriptor)
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    yield from (bytes_of(tensor) for tensor in tensors.values() if tensor.numel())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunked(pieces: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Lists of parts of CHUNK_BYTES together; only the last may be shorter."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for piece in pieces:
        while len(piece):
            parts.append(piece[:room])
            piece, room = piece[room:], room - len(parts[-1])
            if room == 0:
                yield parts
                parts, room = [], CHUNK_BYTES
    if parts:
        yield parts
