"""Compiles the C engine on first use and keeps it in the cache: no compiler at install time, none needed twice."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from openwafer.registry import cache_dir

SOURCES = Path(__file__).parent / "csrc"
# No contraction: a product and a sum round separately, as in arithmetic.py.
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-march=native",
    "-flto",
    "-pthread",
    "-fno-semantic-interposition",
]


class NoCompiler(Exception):
    """The C engine cannot be built here; the message says why."""


def load() -> ctypes.CDLL:
    """The compiled engine, from the cache if this source was compiled on this kind of machine before."""
    library = cache_dir() / "engine" / f"fabric-{_key()}.so"
    if not library.exists():
        _compile(library)
    return ctypes.CDLL(str(library))


def _key() -> str:
    digest = hashlib.sha256(" ".join([platform.machine(), *FLAGS, _processor()]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on: a cache shared between different machines must not mix them up."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(library: Path) -> None:
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        raise NoCompiler(f"no C compiler ({compiler}) on this machine: install gcc or clang, or set CC")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoCompiler(f"cannot write to {library.parent} ({error.strerror}): set OPENWAFER_CACHE") from None
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        sources = sorted(str(path) for path in SOURCES.glob("*.c"))
        command = [*compiler.split(), *FLAGS, *sources, "-o", str(built), "-lm"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise NoCompiler(f"{compiler} could not compile the fabric engine: {lines[0]}")
        built.replace(library)  # one rename: another process sees all of it or nothing
