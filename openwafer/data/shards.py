"""Token shards: a folder of plain little-endian token files, a manifest and the tokenizer.

manifest.json    what is there: vocab size, dtype, tokens and SHA-256 of each file
train-00000.bin  token ids, uint16 when the vocabulary allows it, else uint32
val-00000.bin
tokenizer.json
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openwafer.errors import UserError

FORMAT = 1
SPLITS = ("train", "val")
SHARD_TOKENS = 1 << 27
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_name(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Appends tokens of one split to its files; `close` returns how many tokens each file has."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        self._folder = folder
        self._split = split
        self._dtype = _DTYPES[dtype_name(vocab_size)]
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._tokens: dict[str, int] = {}
        self._file: Any = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_tokens(self) -> int:
        return sum(self._tokens.values())

    def append(self, ids: np.ndarray) -> None:
        """`ids`: whole numbers [n], each below the vocab size."""
        assert ids.size == 0 or int(ids.max()) < self._vocab_size
        while ids.size:
            name = self._current()
            part = ids[: self._shard_tokens - self._tokens[name]]
            self._file.write(part.astype(self._dtype).tobytes())
            self._tokens[name] += part.size
            ids = ids[part.size :]

    def _current(self) -> str:
        """The name of the open file; a new one when the last is full."""
        name = next(reversed(self._tokens), None)
        if name is None or self._tokens[name] >= self._shard_tokens:
            self.close()
            name = f"{self._split}-{len(self._tokens):05d}.bin"
            self._tokens[name] = 0
            self._file = (self._folder / name).open("wb")
        elif self._file is None:
            self._file = (self._folder / name).open("ab")
        return name

    def move_tail(self, other: "ShardWriter", num_tokens: int) -> None:
        """Move the last `num_tokens` tokens to the end of `other`, in order and in bounded memory."""
        self.close()
        skip = self.num_tokens - num_tokens
        for name, tokens in list(self._tokens.items()):
            kept = min(tokens, max(skip, 0))
            skip -= tokens
            if kept == tokens:
                continue
            path = self._folder / name
            moved = np.memmap(path, self._dtype, mode="r")
            for start in range(kept, tokens, 1 << 20):
                other.append(np.asarray(moved[start : start + (1 << 20)]))
            del moved
            if kept:
                with path.open("r+b") as file:
                    file.truncate(kept * self._dtype.itemsize)
                self._tokens[name] = kept
            else:
                path.unlink()
                del self._tokens[name]

    def close(self) -> dict[str, int]:
        """Tokens of each file. More may be appended afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None
        return dict(self._tokens)


def write_manifest(folder: Path, vocab_size: int, end_of_text: int, writers: dict[str, ShardWriter]) -> None:
    """Describe the files that the writers (one per split) wrote into `folder`, with their checksums."""
    splits = {
        split: [
            {"file": name, "tokens": tokens, "sha256": _sha256(folder / name)}
            for name, tokens in writer.close().items()
        ]
        for split, writer in writers.items()
    }
    manifest = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "dtype": dtype_name(vocab_size),
        "end_of_text": end_of_text,
        "tokenizer": "tokenizer.json",
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class ShardFile:
    """One entry of a manifest."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The parts of manifest.json that readers need."""

    vocab_size: int
    dtype: str
    end_of_text: int
    tokenizer: str
    splits: dict[str, list[ShardFile]]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, every field checked."""
    path = folder / "manifest.json"
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder} (`openwafer data prepare` makes one)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {folder} was not written by `openwafer data prepare`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; prepare the data again") from None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise UserError(f"{path} has format {raw['format']}, this version reads up to {FORMAT}: update openwafer")
    try:
        splits = {split: [_entry(entry) for entry in raw["splits"][split]] for split in SPLITS}
        numbers = int(raw["vocab_size"]), _DTYPES[raw["dtype"]], int(raw["end_of_text"])
        if raw["format"] != FORMAT or not 0 <= numbers[2] < numbers[0] or not _plain(raw["tokenizer"]):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path} is damaged: prepare the data again") from None
    return Manifest(numbers[0], raw["dtype"], numbers[2], raw["tokenizer"], splits)


def _entry(raw: Any) -> ShardFile:
    if not _plain(raw["file"]) or not isinstance(raw["tokens"], int) or raw["tokens"] < 1:
        raise ValueError
    return ShardFile(raw["file"], raw["tokens"], str(raw["sha256"]))


def _plain(name: Any) -> bool:
    """A file of this folder: a manifest must not lead anywhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


class Shards:
    """The tokens of one split, memory-mapped."""

    def __init__(self, folder: Path, split: str, manifest: Manifest):
        self.folder = folder
        self.split = split
        self.vocab_size = manifest.vocab_size
        self.end_of_text = manifest.end_of_text
        self.tokenizer = folder / manifest.tokenizer
        self._paths = [folder / entry.file for entry in manifest.splits[split]]
        self._maps = [np.memmap(path, _DTYPES[manifest.dtype], mode="r") for path in self._paths]
        self._starts = np.cumsum([0] + [m.size for m in self._maps])

    @classmethod
    def open(cls, folder: Path, split: str = "train", verify: bool = True) -> "Shards":
        """Open a split; sizes are always checked, contents too with `verify` (reads every file once)."""
        manifest = read_manifest(folder)
        if split not in manifest.splits:
            raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        entries = manifest.splits[split]
        if not entries:
            raise UserError(f"{folder} has no {split} tokens: prepare it with a larger --val_fraction")
        for entry in entries:
            _check_file(folder / entry.file, entry, _DTYPES[manifest.dtype].itemsize, verify)
        if not (folder / manifest.tokenizer).is_file():
            raise UserError(f"{folder / manifest.tokenizer} is missing: prepare the data again")
        return cls(folder, split, manifest)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Token ids [start : start + length] of the split as int64 [length], across file borders."""
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens {start}..{start + length} of a split of {len(self)}")
        out = np.empty(length, dtype=np.int64)
        done = 0
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < length:
            offset = start + done - int(self._starts[index])
            part = self._maps[index][offset : offset + length - done]
            out[done : done + part.size] = part
            # One cheap pass: an id beyond the vocabulary would crash far away, in the embedding kernel.
            if int(part.max()) >= self.vocab_size:
                raise UserError(f"{self._paths[index]} is damaged: it holds token ids beyond the vocabulary")
            done += part.size
            index += 1
        return out


def _check_file(path: Path, entry: ShardFile, itemsize: int, verify: bool) -> None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.tokens * itemsize:
            raise UserError(
                f"{path} is {num_bytes} bytes, expected {entry.tokens * itemsize}: it is truncated; "
                "prepare the data again"
            )
        if verify and _sha256(path) != entry.sha256:
            raise UserError(f"{path} does not match its checksum: prepare the data again")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: prepare the data again") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
