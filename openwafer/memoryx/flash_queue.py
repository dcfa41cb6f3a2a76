"""Background transfers between buffers and files: whole arrays, cut into chunks that several threads move at once."""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openwafer import timeline
from openwafer.direct_io import opened, read_fully, write_fully
from openwafer.memoryx.tier import Key

CHUNK_BYTES = 8 << 20  # long enough for the full rate of a disk, short enough to share among threads


@dataclass(eq=False)
class Transfer:
    """One array to be read from its file or written to it, from byte `offset` on."""

    key: Key
    path: Path
    memory: memoryview
    offset: int
    is_read: bool
    direct: bool
    next_byte: int = 0  # of the first chunk that no thread has taken
    num_running: int = 0  # chunks under way
    error: OSError | None = None

    @property
    def is_taken(self) -> bool:
        return self.next_byte >= len(self.memory) or self.error is not None

    def move(self, start: int) -> None:
        """Move the chunk that starts at byte `start`."""
        chunk = self.memory[start : start + CHUNK_BYTES]
        flags = os.O_RDONLY if self.is_read else os.O_WRONLY | os.O_CREAT
        try:
            with opened(self.path, flags, direct=self.direct) as descriptor:
                if not self.is_read:
                    write_fully(descriptor, chunk, self.offset + start)
                elif read_fully(descriptor, chunk, self.offset + start) < len(chunk):
                    raise OSError(errno.ENODATA, "the file is shorter than what was written to it")
        except OSError as error:
            self.error = error

    def run_alone(self) -> None:
        """All chunks, in this thread."""
        while not self.is_taken:
            self.move(self.next_byte)
            self.next_byte += CHUNK_BYTES


class TransferQueue:
    """Threads that run transfers: reads, which somebody waits for, before writes. Calls `finished` after each."""

    def __init__(self, num_threads: int, finished: Callable[[Transfer], None]) -> None:
        self._finished = finished
        self.num_bytes_read = 0
        self.num_bytes_written = 0
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._added = threading.Condition()
        self._is_closed = False
        # Daemons: a run that ends with an error does not wait for them.
        self._threads = [threading.Thread(target=self._work, name="flash", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def add(self, transfer: Transfer) -> None:
        with self._added:
            (self._reads if transfer.is_read else self._writes).append(transfer)
            self._added.notify_all()

    def close(self) -> None:
        """Finish the chunks under way, drop the rest."""
        with self._added:
            self._is_closed = True
            self._added.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._added:
                self._added.wait_for(lambda: self._is_closed or self._reads or self._writes)
                if self._is_closed:
                    return
                waiting = self._reads or self._writes
                transfer = waiting[0]
                start = transfer.next_byte
                transfer.next_byte += CHUNK_BYTES
                transfer.num_running += 1
                if transfer.is_taken:
                    waiting.popleft()
            lane = timeline.FLASH_READ if transfer.is_read else timeline.FLASH_WRITE
            with timeline.span(lane, transfer.path.name):
                transfer.move(start)
            with self._added:
                transfer.num_running -= 1
                moved = len(transfer.memory[start : start + CHUNK_BYTES])
                if transfer.is_read:
                    self.num_bytes_read += moved
                else:
                    self.num_bytes_written += moved
                if transfer.error is not None and transfer in waiting:
                    waiting.remove(transfer)
                is_last = transfer.num_running == 0 and transfer.is_taken
            if is_last:
                self._finished(transfer)
            del transfer  # a waiting thread must not keep a buffer alive
