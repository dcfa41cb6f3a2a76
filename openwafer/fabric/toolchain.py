"""The C engine, compiled on first use."""

import ctypes
from pathlib import Path

from openwafer.kernels.compiled import NoCompiler, compiled

__all__ = ["NoCompiler", "load"]

_SOURCES = Path(__file__).parent / "csrc"


def load() -> ctypes.CDLL:
    """The compiled engine, from the cache if this source was compiled on this kind of machine before."""
    return compiled("fabric", sorted(_SOURCES.glob("*.c")), ("-flto", "-fno-semantic-interposition"))
