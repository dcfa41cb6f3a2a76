"""The compiled C kernels of the decoder. This module imports no torch: compiling may go on while that is imported."""

import contextlib
import ctypes
import threading
from pathlib import Path

from openwafer.kernels.compiled import NoCompiler, compiled

_SOURCES = Path(__file__).parent / "csrc"
# Loops are written in the order in which they run best, with sums that just fit the registers: GCC's scheduler would
# spill some, and without renaming it moves them about.
_FLAGS = ("-fno-schedule-insns", "-frename-registers")
_building = threading.Lock()


def decoder_library() -> ctypes.CDLL:
    """From the cache if it was built before; NoCompiler where it cannot be."""
    with _building:
        return compiled("decoder", sorted(_SOURCES.glob("*.c")), _FLAGS)


def build_ahead() -> None:
    """Begin to compile in the background, so that the library is there when it is asked for."""

    def build() -> None:
        with contextlib.suppress(NoCompiler):  # whoever asks for it will be told
            decoder_library()

    threading.Thread(target=build, name="compile", daemon=True).start()
