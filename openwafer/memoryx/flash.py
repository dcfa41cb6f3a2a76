"""The flash tier: flat arrays in files of a folder, with a bounded pool of buffers in memory.

Reads run ahead and writes run behind in background threads. A buffer is in one of these conditions:

    reading     its file is being read; `load` waits
    pinned      between `load` and `release`
    dirty       changed and not yet on flash; a write is queued or under way
    clean       the same as its file: kept while there is room, dropped when room is needed

Files hold one array each and are scratch: they start as holes, and go when the tier is closed or, after a kill,
when the next run takes the folder. Training resumes from checkpoints, never from here.
"""

import contextlib
import errno
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from openwafer.direct_io import BLOCK_BYTES, aligned_bytes, bytes_of, has_direct, opened, rounded_up
from openwafer.errors import UserError
from openwafer.file_lock import FileLock
from openwafer.memoryx.flash_queue import Transfer, TransferQueue
from openwafer.memoryx.tier import Key

_SCRATCH = re.compile(r"\d{5,}\.\w+\.[01]\.flash")
NUM_THREADS = 4
_FIXES = {
    errno.ENOSPC: "free some space, or choose another flash folder",
    errno.EDQUOT: "free some space, or choose another flash folder",
    errno.ENOENT: "the files in a flash folder belong to the run that uses it",
    errno.ENODATA: "the files in a flash folder belong to the run that uses it",
    errno.EIO: "the disk may be failing: choose another flash folder",
}


@dataclass(eq=False)
class _Array:
    """One array: its file, and its buffer if it has one."""

    key: Key
    num_bytes: int
    dtype: torch.dtype
    version: int = 0  # which of two files is the current one; the other may be frozen
    buffer: Tensor | None = None
    pins: list[int] = field(default_factory=list)  # threads of the loads not yet released
    reading: bool = False
    dirty: bool = False
    writing: bool = False
    unused: bool = False  # prefetched and not loaded since

    @property
    def buffer_bytes(self) -> int:
        return max(rounded_up(self.num_bytes), BLOCK_BYTES)

    @property
    def is_idle(self) -> bool:
        """Whether the buffer can be taken away."""
        return self.buffer is not None and not (self.pins or self.reading or self.dirty or self.writing)


class FlashTier:
    """Arrays in files. The pool never exceeds `pool_bytes`; what is loaded at one time has to fit into it.

    `allocate` makes a page-aligned uint8 buffer (pinned memory, for instance). `comfort` ends an error of the disk.
    """

    reads_in_place = False

    def __init__(
        self,
        folder: Path,
        pool_bytes: int,
        *,
        num_threads: int = NUM_THREADS,
        allocate: Callable[[int], Tensor] = aligned_bytes,
        comfort: str = "Checkpoints are intact: the same command resumes from the last one",
    ) -> None:
        self.folder = folder
        self.pool_bytes = pool_bytes
        self._allocate = allocate
        self._comfort = comfort
        self._arrays: dict[Key, _Array] = {}
        self._lru: OrderedDict[Key, None] = OrderedDict()  # arrays with a buffer, the least recently used first
        self._free: dict[int, list[Tensor]] = {}  # size → buffers without an array
        self._used_bytes = 0  # of all buffers, free ones too
        self._hints: OrderedDict[Key, None] = OrderedDict()  # prefetches that wait for room
        self._num_waiting = 0  # loads that wait for room: prefetches let them pass
        self._frozen: dict[Key, int] = {}  # version of the file with the frozen content
        self._reader: Tensor | None = None  # buffer of `read_frozen`
        self._error: UserError | None = None
        self._changed = threading.Condition()
        self._lock = _take(folder)
        self.direct = has_direct(folder)
        self._queue = TransferQueue(num_threads, self._finished)

    @property
    def num_bytes_moved(self) -> tuple[int, int]:
        """Read from and written to files so far."""
        return self._queue.num_bytes_read, self._queue.num_bytes_written

    # Arrays

    def create(self, key: Key, num_elements: int, dtype: torch.dtype) -> None:
        """Zeros: a hole in a new file, which takes neither memory nor time."""
        array = _Array(key, num_elements * dtype.itemsize, dtype)
        if array.buffer_bytes > self.pool_bytes:
            raise UserError(
                f"the buffers for flash hold {self.pool_bytes:,} bytes, an array of {self._path(array).name} "
                f"needs {array.buffer_bytes:,}: give more DRAM"
            )
        path = self._path(array)
        try:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct=False) as descriptor:
                os.ftruncate(descriptor, array.buffer_bytes)
        except OSError as error:
            raise self._failure(path, "create", error) from None
        self._arrays[key] = array

    def prefetch(self, key: Key) -> None:
        with self._changed:
            self._check()
            if self._arrays[key].buffer is None:
                self._hints[key] = None
                self._follow_hints()

    def load(self, key: Key) -> Tensor:
        with self._changed:
            self._check()
            array = self._arrays[key]
            self._hints.pop(key, None)
            array.pins.append(threading.get_ident())  # from now on nobody takes its buffer away
            try:
                self._bring(array)
            except UserError:
                _unpin(array)
                raise
            array.unused = False
            self._lru.move_to_end(key)
            assert array.buffer is not None
            return array.buffer[: array.num_bytes].view(array.dtype)

    def release(self, key: Key, *, changed: bool) -> None:
        with self._changed:
            array = self._arrays[key]
            _unpin(array)
            if changed:
                array.dirty = True
            if array.dirty and not array.pins and not array.writing:
                self._start_write(array)
            self._follow_hints()
            self._changed.notify_all()
            self._check()

    def flush(self) -> None:
        """Wait until every change is in its file."""
        with self._changed:
            self._wait(lambda: not any(array.dirty or array.writing for array in self._arrays.values()))

    def close(self) -> None:
        """Stop, and remove the files. Whoever waits for an array is told."""
        with self._changed:
            self._error = self._error or UserError(f"flash folder {self.folder} was closed while it was in use")
            self._changed.notify_all()
        self._queue.close()
        for array in self._arrays.values():
            for version in (0, 1):
                with contextlib.suppress(OSError):
                    self._path(array, version).unlink(missing_ok=True)
        self._arrays.clear()
        self._lru.clear()
        self._free.clear()
        self._reader = None
        self._lock.close()

    # Frozen content: a write goes to the other file of an array while this one is still to be read

    def freeze(self) -> None:
        self.flush()
        with self._changed:
            self._frozen = {key: array.version for key, array in self._arrays.items()}

    def preserve(self, key: Key) -> None:
        pass

    def pick(self, keys: Sequence[Key]) -> Key | None:
        return None

    def read_frozen(self, key: Key, start: int, num_elements: int) -> Tensor:
        with self._changed:
            array, version = self._arrays[key], self._frozen[key]
        path = self._path(array, version)
        first = start * array.dtype.itemsize
        end = first + num_elements * array.dtype.itemsize
        begin = first // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = rounded_up(end) - begin
        if self._reader is None or self._reader.numel() < num_bytes:
            self._reader = None  # the old one goes before the new one comes
            self._reader = aligned_bytes(num_bytes)
        transfer = Transfer(key, path, bytes_of(self._reader)[:num_bytes], begin, is_read=True, direct=self.direct)
        transfer.run_alone()
        if transfer.error is not None:
            raise self._failure(path, "read", transfer.error)
        return self._reader[first - begin : end - begin].view(array.dtype)

    def drop_frozen(self, key: Key) -> None:
        with self._changed:
            version = self._frozen.pop(key, None)
            array = self._arrays[key]
            if version is not None and version != array.version:
                self._path(array, version).unlink(missing_ok=True)

    def thaw(self) -> None:
        for key in list(self._frozen):
            self.drop_frozen(key)

    # Room for buffers (all with the condition held)

    def _bring(self, array: _Array) -> None:
        """Have the content of a pinned array in a buffer."""
        if array.buffer is None:
            self._num_waiting += 1
            try:
                self._make_room(array)
            finally:
                self._num_waiting -= 1
            if array.buffer is None:  # else another thread brought it while this one waited
                self._start_read(array)
        self._wait(lambda: not array.reading)

    def _make_room(self, array: _Array) -> None:
        mine = sum(
            other.buffer_bytes
            for other in self._arrays.values()
            if threading.get_ident() in other.pins and (other.buffer is not None or other is array)
        )
        if mine > self.pool_bytes:
            raise UserError(
                f"{mine:,} bytes of flash arrays are in use at one time, the buffers for flash hold "
                f"{self.pool_bytes:,}: give more DRAM"
            )
        self._wait(lambda: array.buffer is not None or self._has_room(array.buffer_bytes, may_drop_unused=True))

    def _has_room(self, num_bytes: int, *, may_drop_unused: bool) -> bool:
        """Whether a buffer can be had now; drops free and clean ones as needed."""
        if self._free.get(num_bytes):
            return True
        while self._used_bytes + num_bytes > self.pool_bytes:
            if not (self._drop_free() or self._drop_clean(may_drop_unused=may_drop_unused)):
                return False
            if self._free.get(num_bytes):
                return True
        return True

    def _drop_free(self) -> bool:
        for size, buffers in self._free.items():
            if buffers:
                buffers.pop()
                self._used_bytes -= size
                return True
        return False

    def _drop_clean(self, *, may_drop_unused: bool) -> bool:
        """Take the buffer of the array that was used longest ago; prefetched ones go last, if at all."""
        idle = [self._arrays[key] for key in self._lru if self._arrays[key].is_idle]
        victims = [array for array in idle if not array.unused] or (idle if may_drop_unused else [])
        if not victims:
            return False
        victim = victims[0]
        assert victim.buffer is not None
        self._free.setdefault(victim.buffer.numel(), []).append(victim.buffer)
        victim.buffer, victim.unused = None, False
        del self._lru[victim.key]
        return True

    def _take_buffer(self, array: _Array) -> Tensor:
        free = self._free.get(array.buffer_bytes)
        if free:
            return free.pop()
        buffer = self._allocate(array.buffer_bytes)
        self._used_bytes += array.buffer_bytes
        return buffer

    # Transfers (all with the condition held)

    def _follow_hints(self) -> None:
        """Start the reads that were asked for, in order, as far as there is room."""
        while self._hints and not self._num_waiting and self._error is None:
            key = next(iter(self._hints))
            array = self._arrays[key]
            if array.buffer is None:
                if not self._has_room(array.buffer_bytes, may_drop_unused=False):
                    return
                self._start_read(array)
                array.unused = True
            del self._hints[key]

    def _start_read(self, array: _Array) -> None:
        array.buffer = self._take_buffer(array)
        array.reading = True
        self._lru[array.key] = None
        self._submit(array, is_read=True)

    def _start_write(self, array: _Array) -> None:
        if self._frozen.get(array.key) == array.version:
            array.version = 1 - array.version  # whole arrays are written, so nothing has to be copied
        array.dirty, array.writing = False, True
        self._submit(array, is_read=False)

    def _submit(self, array: _Array, *, is_read: bool) -> None:
        assert array.buffer is not None
        memory = bytes_of(array.buffer)
        self._queue.add(Transfer(array.key, self._path(array), memory, 0, is_read=is_read, direct=self.direct))

    def _finished(self, transfer: Transfer) -> None:
        """Called by a background thread."""
        with self._changed:
            array = self._arrays[transfer.key]
            if transfer.error is not None:
                action = "read" if transfer.is_read else "write"
                self._error = self._error or self._failure(transfer.path, action, transfer.error)
            if transfer.is_read:
                array.reading = False
            else:
                array.writing = False
                if array.dirty and not array.pins and self._error is None:
                    self._start_write(array)  # changed again while it was being written
            try:
                self._follow_hints()
            except UserError as error:  # no memory for a buffer: for whoever waits, this thread has other work
                self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or condition())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise UserError(str(self._error))

    def _failure(self, path: Path, action: str, error: OSError) -> UserError:
        fix = _FIXES.get(error.errno or 0, "choose another flash folder")
        return UserError(f"cannot {action} {path}: {error.strerror or error}; {fix}. {self._comfort}")

    def _path(self, array: _Array, version: int | None = None) -> Path:
        unit, name = array.key
        return self.folder / f"{unit:05d}.{name}.{array.version if version is None else version}.flash"


def _unpin(array: _Array) -> None:
    me = threading.get_ident()
    array.pins.remove(me if me in array.pins else array.pins[0])


def _take(folder: Path) -> FileLock:
    """Lock the folder for this process and remove what a killed run left in it."""
    busy = f"flash folder {folder} is used by another run: give each run its own --flash"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", busy)
        try:
            for path in _scratch_files(folder):
                path.unlink()
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise UserError(f"cannot use flash folder {folder}: {error.strerror or error}") from None
    return lock


def _scratch_files(folder: Path) -> Iterator[Path]:
    return (path for path in list(folder.iterdir()) if _SCRATCH.fullmatch(path.name))
