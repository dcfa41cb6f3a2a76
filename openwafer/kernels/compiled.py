"""C sources of this package as loaded libraries: built once with the machine's `cc`, kept in the cache.

Nothing depends on a compiler: `library` gives None where there is none, and callers fall back to a reference.
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
from pathlib import Path

from openwafer.registry import cache_dir

# No contraction to fused multiply-add: results then equal the same operations done one by one anywhere else.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c in this folder, or None when it cannot be built here."""
    source = Path(__file__).with_name(f"{name}.c")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.warning("no C compiler found: %s runs on its slower reference", name)
        return None
    # The processor is part of the key: a cache on a shared disk may serve several kinds of machine.
    key = hashlib.sha256(source.read_bytes() + f"{compiler} {_FLAGS} {_processor()}".encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"{name}-{key}.so"
    if not target.is_file() and not _build(compiler, source, target):
        return None
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        _log.warning("cannot load %s (%s): its slower reference runs instead", target, error)
        return None


def _build(compiler: str, source: Path, target: Path) -> bool:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder, target.name)
            command = [compiler, *_FLAGS, str(source), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[0]
                _log.warning(
                    "%s cannot build %s (%s): its slower reference runs instead", compiler, source.name, reason
                )
                return False
            built.replace(target)
    except OSError as error:
        _log.warning("cannot build %s (%s): its slower reference runs instead", source.name, error)
        return False
    return True


def _processor() -> str:
    """Something that differs between processors with different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
