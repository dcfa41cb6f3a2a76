"""Ctrl-C while the command is still being imported: no traceback, whatever Python was in the middle of."""

import os
import signal


class LeaveAtOnce:
    """Inside this context Ctrl-C ends the process with status 130. For imports, which have nothing to clean up.

    A KeyboardInterrupt would not do: Python swallows it or turns it into another error in some places of an import.
    """

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:  # not in the background of a shell, which ignores it
            self._set(_leave)

    def __exit__(self, *_: object) -> None:
        if self._before is signal.default_int_handler:
            self._set(signal.default_int_handler)

    @staticmethod
    def _set(handler: object) -> None:
        try:
            signal.signal(signal.SIGINT, handler)  # pyright: ignore[reportArgumentType]
        except ValueError:
            return  # not in the main thread, where alone Ctrl-C arrives


def _leave(number: int, frame: object) -> None:
    os.write(2, b"openwafer: interrupted\n")
    os._exit(130)
