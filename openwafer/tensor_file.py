"""Writes safetensors files at the rate of the disk: direct I/O, hashed on the way, in bounded memory.

Tensors are copied into aligned chunks as they come; threads hash the chunks and write them. The header is written
last, into room left for it at the start, so a file that was cut short has none.

A file's `digest` is the SHA-256 of the SHA-256s of its pieces: the header (with its length), then chunks of
`chunk_bytes`. One core hashes more slowly than a good disk writes; pieces can be hashed by several.
"""

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openwafer.direct_io import aligned_bytes, bytes_of, open_file, rounded_up, write_fully

CHUNK_BYTES = 4 << 20
LARGE_CHUNK_BYTES = 16 << 20  # of files of large checkpoints: threads disturb training less often
HEADER_BYTES = 32 << 10  # room for the header, unless one tensor needs more
_NUM_THREADS = min(6, (os.cpu_count() or 1) + 2)  # some hash while others wait for the disk
_NICENESS = 10  # a tenth of a core that is wanted by others as well, all of one that is not
_FIXED_BYTES = 16  # of a header without entries
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


class ChunkPool:
    """Threads, and the chunks that they work on: whoever takes one waits until one is free."""

    def __init__(self, num_threads: int = _NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="chunks", initializer=_yield_to_others)
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(num_threads + 1):
            self._free.put(None)  # allocated when they are needed
        self._error: BaseException | None = None

    def take(self, num_bytes: int = CHUNK_BYTES) -> Tensor:
        chunk = self._free.get()
        if self._error is not None:
            self._free.put(chunk)
            raise self._error
        if chunk is None or len(chunk) < num_bytes:
            del chunk  # the old one goes before the new one comes
            return aligned_bytes(num_bytes)
        return chunk

    def run(self, work: Callable[[], None], chunk: Tensor | None = None) -> None:
        """Have it done by a thread, which then frees the chunk."""
        self._threads.submit(self._run, work, chunk)

    def _run(self, work: Callable[[], None], chunk: Tensor | None) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever takes the next chunk or closes
            self._error = error
        finally:
            if chunk is not None:
                self._free.put(chunk)

    def close(self) -> None:
        """Until all is done; raises what went wrong."""
        self._threads.shutdown()
        if self._error is not None:
            raise self._error


class TensorFile:
    """One new file. Once `finish` was called and the pool is closed, it is on disk and has a `digest`."""

    def __init__(
        self,
        path: Path,
        pool: ChunkPool,
        *,
        direct: bool,
        header_bytes: int = HEADER_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.path = path
        self.chunk_bytes = chunk_bytes
        self.num_bytes = 0  # of the tensors so far
        self.digest: str | None = None  # filled when the file is on disk
        self.header_bytes = header_bytes
        self._pool = pool
        self._entries: dict[str, dict[str, Any]] = {}
        self._entries_bytes = _FIXED_BYTES
        self._chunk: Tensor | None = None
        self._filled = 0  # bytes of the chunk
        self._digests: list[bytes] = []  # of chunks, filled by threads
        self._num_left = 1  # pieces to be written, the header too
        self._lock = threading.Lock()
        self._descriptor: int | None = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=direct)

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether the header can name one more, and the tensor would start at a multiple of its element."""
        more = _entry_bytes(name, _entry(tensor, self.num_bytes))
        return self._entries_bytes + more <= self.header_bytes and self.num_bytes % tensor.itemsize == 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a contiguous CPU tensor: afterwards the caller may change it."""
        assert name not in self._entries, f"two tensors are called {name}"
        self._entries[name] = _entry(tensor, self.num_bytes)
        self._entries_bytes += _entry_bytes(name, self._entries[name])
        left = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
        self.num_bytes += len(left)
        while len(left):
            if self._chunk is None:
                self._chunk = self._pool.take(self.chunk_bytes)
            count = min(len(left), self.chunk_bytes - self._filled)
            # numpy's copy lets other threads run, that of a memoryview does not
            np.copyto(self._chunk.numpy()[self._filled : self._filled + count], left[:count])
            left = left[count:]
            self._filled += count
            if self._filled == self.chunk_bytes:
                self._send()

    def finish(self) -> None:
        """The last chunk and the header are sent off."""
        if self._chunk is not None:
            self._send()
        self._pool.run(self._piece_done)

    def close(self) -> None:
        """Give the file up, or nothing if it is finished."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _send(self) -> None:
        chunk, length, number = self._chunk, self._filled, len(self._digests)
        assert chunk is not None
        self._chunk, self._filled = None, 0
        self._digests.append(b"")
        with self._lock:
            self._num_left += 1

        def work() -> None:
            memory = bytes_of(chunk)
            self._digests[number] = hashlib.sha256(memory[:length]).digest()
            # The last one is written in whole blocks: what is too much is cut off at the end.
            write_fully(self._file, memory[: rounded_up(length)], self.header_bytes + number * self.chunk_bytes)
            self._piece_done()

        self._pool.run(work, chunk)

    @property
    def _file(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def _piece_done(self) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._end()

    def _end(self) -> None:
        """The header last: a file without its content has no header either."""
        os.ftruncate(self._file, self.header_bytes + self.num_bytes)
        memory = bytes_of(aligned_bytes(self.header_bytes))
        text = json.dumps(self._entries, separators=(",", ":")).encode()
        room = self.header_bytes - 8
        memory[:8] = room.to_bytes(8, "little")
        memory[8:] = text + b" " * (room - len(text))
        write_fully(self._file, memory, 0)
        os.fsync(self._file)
        self.close()
        self.digest = _joined([hashlib.sha256(memory).digest(), *self._digests])


def _yield_to_others() -> None:
    """Training that goes on meanwhile has the processor first: each of its steps waits for the slowest thread."""
    with contextlib.suppress(OSError, AttributeError):  # a system whose threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def header_bytes_for(name: str, tensor: Tensor) -> int:
    """Room for the header of a file that begins with this tensor."""
    return max(HEADER_BYTES, rounded_up(_FIXED_BYTES + _entry_bytes(name, _entry(tensor, 0))))


def digest_of(path: Path, header_bytes: int, chunk_bytes: int) -> str:
    """The digest of a file as it is now."""
    num_bytes = path.stat().st_size
    starts = [0, *range(header_bytes, num_bytes, max(1, chunk_bytes))]
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_NUM_THREADS) as threads:

        def piece(start: int) -> bytes:
            digest, end = hashlib.sha256(), min(num_bytes, start + chunk_bytes if start else header_bytes)
            for part in _parts(file.fileno(), start, end):
                digest.update(part)
            return digest.digest()

        return _joined(list(threads.map(piece, starts)))


def _parts(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    """What is read at one time is bounded, whatever a manifest says."""
    while start < end:
        part = os.pread(descriptor, min(end - start, CHUNK_BYTES), start)
        if not part:
            return
        yield part
        start += len(part)


def _joined(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _entry(tensor: Tensor, start: int) -> dict[str, Any]:
    offsets = [start, start + tensor.nbytes]
    return {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}


def _entry_bytes(name: str, entry: dict[str, Any]) -> int:
    return len(json.dumps({name: entry}, separators=(",", ":")))
