"""Documents from .txt, .jsonl and .jsonl.gz files, in pieces, so that no file has to fit in memory."""

import codecs
import contextlib
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from openwafer.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")
_BLOCK_BYTES = 1 << 20
PIECE_CHARS = 1 << 18

# A newline between two non-blank characters: byte-level pre-tokenizers always end a word there, so cutting
# a long document at such a place does not change its tokens.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Piece:
    """A run of text; `ends` when it is the last of its document. `num_bytes`: input consumed by it."""

    text: str
    ends: bool
    num_bytes: int


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """The files named by files, folders (searched through) and glob patterns; each once, folders sorted."""
    found: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(p for p in map(Path, glob.glob(str(given), recursive=True)) if p.is_file())
        if not matches:
            raise UserError(f"no text found at {given}: expected {', '.join(SUFFIXES)} files")
        for match in matches:
            if not match.name.endswith(SUFFIXES):
                raise UserError(f"cannot read {match}: expected a file that ends in {', '.join(SUFFIXES)}")
            found[match] = None
    return list(found)


def read_documents(files: Iterable[Path], text_key: str) -> Iterator[Piece]:
    """The documents of the files, in order. A document is one .txt file or one line of a .jsonl file."""
    for path in files:
        try:
            if path.name.endswith(".txt"):
                yield from _pieces_of_text(path)
            else:
                yield from _pieces_of_lines(path, text_key)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read {path}: {error}") from None


def _pieces_of_text(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, num_bytes, position = "", 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            rest += _decoded(decoder, block, path, position)
            num_bytes += len(block)
            position += len(block)
            while len(rest) > 2 * PIECE_CHARS:
                text, rest = _cut(rest)
                yield Piece(text, False, num_bytes)
                num_bytes = 0
    rest += _decoded(decoder, b"", path, position)
    for text, ends in split(rest):
        yield Piece(text, ends, num_bytes)
        num_bytes = 0


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, position: int) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        offset = position - pending + error.start
        raise UserError(f"{path} is not UTF-8 text: bad byte at offset {offset}; convert it first") from None


def split(text: str) -> Iterator[tuple[str, bool]]:
    """A document as (piece, is the last one)."""
    while len(text) > 2 * PIECE_CHARS:
        piece, text = _cut(text)
        yield piece, False
    yield text, True


def _cut(text: str) -> tuple[str, str]:
    match = _SAFE_CUT.search(text, PIECE_CHARS, 2 * PIECE_CHARS)
    place = match.start() if match else PIECE_CHARS
    return text[:place], text[place:]


def _pieces_of_lines(path: Path, text_key: str) -> Iterator[Piece]:
    packed = path.name.endswith(".gz")
    with path.open("rb") as raw, gzip.open(raw) if packed else contextlib.nullcontext(raw) as lines:
        done = 0
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            for text, ends in split(_text_of(line, text_key, f"{path} line {number}")):
                position = raw.tell()
                yield Piece(text, ends, position - done)
                done = position


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} must be a JSON object with the key {text_key!r}")
    if not isinstance(record.get(text_key), str):
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        problem = "is not text" if text_key in record else f"is missing (keys: {keys})"
        raise UserError(f"{where}: the key {text_key!r} {problem}; choose another with --text_key")
    text = record[text_key]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the text holds a lone surrogate, which is not Unicode text") from None
    return text
