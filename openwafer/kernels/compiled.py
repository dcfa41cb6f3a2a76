"""C sources of this package as loaded libraries: built once with the machine's `cc`, kept in the cache.

Nothing depends on a compiler: where there is none, callers fall back to the reference beside each kernel.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from openwafer.registry import cache_dir

# No contraction to fused multiply-add: results then equal the same operations done one by one anywhere else.
_FLAGS = ("-O3", "-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


class NoCompiler(Exception):
    """A library cannot be built here; the message says why."""


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c in this folder, or None, with a warning, when it cannot be built here."""
    try:
        return compiled(name, [Path(__file__).with_name(f"{name}.c")])
    except NoCompiler as error:
        _log.warning("%s: the slower reference of %s runs instead", error, name)
        return None


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of some C files (their headers beside them), from the cache if it was built before."""
    key = hashlib.sha256(" ".join([platform.machine(), *_FLAGS, *flags, _processor()]).encode())
    for folder in sorted({source.parent for source in sources}):
        for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
            key.update(path.name.encode() + path.read_bytes())
    target = cache_dir() / "kernels" / f"{name}-{key.hexdigest()[:24]}.so"
    if not target.is_file():
        _build(target, [*_FLAGS, *flags, *map(str, sources)])
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NoCompiler(f"cannot load {target} ({error})") from None


def _build(target: Path, arguments: Sequence[str]) -> None:
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        raise NoCompiler(f"no C compiler ({compiler}) on this machine: install gcc or clang, or set CC")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder, target.name)
            command = [*compiler.split(), *arguments, "-o", str(built), "-lm"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[0]
                raise NoCompiler(f"{compiler} could not compile {target.stem}: {reason}")
            built.replace(target)  # one rename: another process sees all of it or nothing
    except OSError as error:
        raise NoCompiler(f"cannot write to {target.parent} ({error.strerror}): set OPENWAFER_CACHE") from None


def _processor() -> str:
    """What -march=native depends on: a cache shared between different machines must not mix them up."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
