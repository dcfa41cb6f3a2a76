"""Checkpoints: safetensors shards and a manifest, committed by one rename; never pickle.

    MODEL_DIR/checkpoints/step_00000100/
        manifest.json                 format, step, tensors, files with bytes and checksums, meta
        tensors-00000.safetensors     at most `shard_bytes` each, unless one tensor is larger
        tokenizer.json                when one was given

Tensor names: `weights/<param>`, `buffers/<buffer>`, `optimizer/<kind>/<param>`. A folder named `step_...` is
always whole: it is written under another name and synced to disk before it gets its own.
"""

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from openwafer.direct_io import has_direct
from openwafer.errors import UserError
from openwafer.file_lock import FileLock
from openwafer.tensor_file import CHUNK_BYTES, LARGE_CHUNK_BYTES, ChunkPool, TensorFile, digest_of, header_bytes_for

FORMAT = 2  # format 1 has the SHA-256 of whole files only
SHARD_BYTES = 256 << 20
_FEW_SHARDS = 4  # with more, memory for larger chunks is little beside the checkpoint
_STEP = re.compile(r"step_(\d{8,})")
_RETIRED = re.compile(r"\.(step_\d{8,})\.old")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(new|gone)\..*")
_log = logging.getLogger(__name__)


class BrokenCheckpoint(UserError):
    """A piece is missing, truncated or does not match its checksum."""


def save(
    model_dir: Path,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    meta: dict[str, Any],
    *,
    tokenizer: Path | None = None,
    keep: int | None = 3,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint and return its folder; then delete all but the last `keep` (None: delete none).

    Each tensor is copied in chunks while they are written, so the caller may reuse its buffer; a few chunks of
    `LARGE_CHUNK_BYTES` are held. `meta` is any JSON. If writing fails, earlier checkpoints are as they were.
    """
    assert step >= 0
    assert keep is None or keep >= 1
    root = model_dir / "checkpoints"
    target = root / f"step_{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_writer(root):
            _clean(root)
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.new.", dir=root))
            try:
                folder.chmod(0o755)
                _write(folder, step, tensors, meta, tokenizer, shard_bytes)
                _commit(folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if keep is not None:
                _prune(root, target, keep)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write checkpoint {target}: {error}; earlier checkpoints are intact: "
            "free some space or choose another --model_dir"
        ) from None
    return target


def _only_writer(root: Path) -> FileLock:
    """One process saves at a time. The lock dies with its holder, so what lies around under it is litter."""
    return FileLock(root / ".lock", f"another run is saving into {root}: give each run its own --model_dir")


def _clean(root: Path) -> None:
    """Remove what killed writers left; undo a replacement that was cut between its two renames."""
    for path in sorted(root.iterdir()):
        retired = _RETIRED.fullmatch(path.name)
        if retired and not (root / retired[1]).exists():
            path.rename(root / retired[1])
        elif retired or _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    meta: dict[str, Any],
    tokenizer: Path | None,
    shard_bytes: int,
) -> None:
    entries, files = _write_tensors(folder, tensors, shard_bytes)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        _sync(folder / "tokenizer.json")
        files["tokenizer.json"] = {"sha256": _sha256(folder / "tokenizer.json")}
    files = {name: {"bytes": (folder / name).stat().st_size, **entry} for name, entry in files.items()}
    manifest = {"format": FORMAT, "step": step, "tensors": entries, "files": files, "meta": meta}
    manifest["checksum"] = _checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(folder / "manifest.json")
    _sync(folder)


def _write_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The manifest's entries of all tensors and of their files, which are on disk."""
    entries: dict[str, dict[str, Any]] = {}
    shards: list[TensorFile] = []
    pool, direct = ChunkPool(), has_direct(folder)
    try:
        try:
            for name, given in tensors:
                tensor = given.detach().cpu().contiguous()
                assert name not in entries, f"two tensors are called {name}"
                if not shards or _must_end(shards[-1], name, tensor, shard_bytes):
                    if shards:
                        shards[-1].finish()  # in the background: the next one begins at once
                    path = folder / f"tensors-{len(shards):05d}.safetensors"
                    shards.append(
                        TensorFile(
                            path,
                            pool,
                            direct=direct,
                            header_bytes=header_bytes_for(name, tensor),
                            chunk_bytes=CHUNK_BYTES if len(shards) < _FEW_SHARDS else LARGE_CHUNK_BYTES,
                        )
                    )
                entries[name] = {"file": shards[-1].path.name, **_spec(tensor)}
                shards[-1].add(name, tensor)
            if shards:
                shards[-1].finish()
        finally:
            pool.close()
    finally:
        for shard in shards:
            shard.close()
    files: dict[str, dict[str, Any]] = {}
    for shard in shards:
        assert shard.digest is not None
        files[shard.path.name] = {
            "sha256_of_pieces": shard.digest,
            "header_bytes": shard.header_bytes,
            "piece_bytes": shard.chunk_bytes,
        }
    return entries, files


def _must_end(shard: TensorFile, name: str, tensor: torch.Tensor, shard_bytes: int) -> bool:
    return shard.num_bytes + tensor.nbytes > shard_bytes or not shard.has_room(name, tensor)


def _spec(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _commit(folder: Path, target: Path) -> None:
    """Give the finished folder its name. A checkpoint of the same step steps aside first; `latest` and the
    next save know its other name, so a kill in between loses nothing."""
    retired = target.with_name(f".{target.name}.old")
    if target.exists():
        target.rename(retired)
    folder.rename(target)
    _sync(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _prune(root: Path, newest: Path, keep: int) -> None:
    others = sorted((s, path) for s, path in _steps(root) if path != newest)
    for _, path in others[: max(0, len(others) - (keep - 1))]:
        # Renamed before it is deleted: a half-deleted folder must not look like a checkpoint.
        gone = path.with_name(f".{path.name}.gone.{os.getpid()}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Committed checkpoints as (step, folder); a retired one counts while nothing has taken its place."""
    for path in root.iterdir() if root.is_dir() else ():
        name = path.name
        retired = _RETIRED.fullmatch(name)
        if retired and not (root / retired[1]).exists():
            name = retired[1]
        match = _STEP.fullmatch(name)
        if match and path.is_dir():
            yield int(match[1]), path


@functools.cache  # a run looks for its newest checkpoint several times
def _warn_once(text: str) -> None:
    _log.warning(text)


def latest(model_dir: Path) -> Path | None:
    """The folder of the newest whole checkpoint, or None. Damaged ones are passed over with a warning."""
    for _, path in sorted(_steps(model_dir / "checkpoints"), reverse=True):
        try:
            Checkpoint.open(path)
        except BrokenCheckpoint as error:
            _warn_once(f"passing over a damaged checkpoint: {error}")
            continue
        return path
    return None


class Checkpoint:
    """A checkpoint opened for reading."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.step: int = manifest["step"]
        self.meta: dict[str, Any] = manifest["meta"]
        self._tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self._files: dict[str, dict[str, Any]] = manifest["files"]
        self._verified: set[str] = set()
        self._last: tuple[str, Any] | None = None  # only one file is held mapped

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Check the manifest and that every file is there at its size; contents are checked when read."""
        manifest = _read_manifest(folder)
        for name, entry in manifest["files"].items():
            path = folder / name
            num_bytes = path.stat().st_size if path.is_file() else None
            if num_bytes is None:
                raise BrokenCheckpoint(f"{path} is missing: use another checkpoint")
            if num_bytes != entry["bytes"]:
                raise BrokenCheckpoint(
                    f"{path} is {num_bytes} bytes, expected {entry['bytes']}: it is truncated; use another checkpoint"
                )
        return cls(folder, manifest)

    @property
    def tokenizer(self) -> Path | None:
        return self.folder / "tokenizer.json" if "tokenizer.json" in self._files else None

    def names(self, prefix: str = "") -> list[str]:
        """Tensor names, in the order they were saved; for instance of the group `weights/`."""
        return [name for name in self._tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def dtype_name(self, name: str) -> str:
        """Such as `float32`."""
        return self._tensors[name]["dtype"]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file. The file's checksum is checked before its first use."""
        if name not in self._tensors:
            raise UserError(f"checkpoint {self.folder} has no tensor {name!r}")
        entry = self._tensors[name]
        try:
            tensor = self._file(entry["file"]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BrokenCheckpoint(f"cannot read {self.folder / entry['file']}: {error}") from None
        found = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if found != (entry["shape"], entry["dtype"]):
            raise BrokenCheckpoint(
                f"{self.folder / entry['file']}: {name} is {found[1]} {found[0]}, "
                f"the manifest says {entry['dtype']} {entry['shape']}"
            )
        return tensor

    def _file(self, name: str) -> Any:
        if self._last is None or self._last[0] != name:
            path = self.folder / name
            if name not in self._verified and not _matches(path, self._files[name]):
                raise BrokenCheckpoint(
                    f"{path} does not match its checksum: remove {self.folder} to go on from the one before"
                )
            self._verified.add(name)
            self._last = None  # the old mapping goes before the new one comes
            self._last = (name, safe_open(path, framework="pt"))
        return self._last[1]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint(f"{path} is missing: {folder} is not a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"cannot read {path}: {error}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} has format {version}, this version reads up to {FORMAT}: update openwafer")
    if version not in (1, FORMAT) or manifest.pop("checksum", None) != _checksum(manifest):
        raise BrokenCheckpoint(f"{path} is damaged: it does not match its own checksum")
    # The checksum keeps out accidents; whoever made the file, its names must not lead out of the folder.
    tensors, files = manifest["tensors"].values(), manifest["files"]
    if any(Path(name).name != name for name in files) or any(entry["file"] not in files for entry in tensors):
        raise BrokenCheckpoint(f"{path} is damaged: it names files that are not in {folder}")
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a file still has the content that was written."""
    if "sha256" in entry:
        return _sha256(path) == entry["sha256"]
    return digest_of(path, entry["header_bytes"], entry["piece_bytes"]) == entry["sha256_of_pieces"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have a file or folder on disk before the next step is taken."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
