"""A file that one process at a time may hold; the lock dies with its holder, however that ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from openwafer.errors import UserError


class InUse(UserError):
    """Another process holds the lock."""


class FileLock:
    """Held from its making until `close`. Processes that this one starts do not inherit it."""

    def __init__(self, path: Path, busy: str) -> None:
        """`busy` is what a user is told when another process holds it. OSError if the file cannot be made."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise InUse(busy) from None
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
