"""`openwafer data prepare`: documents to token shards."""

import contextlib
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openwafer.config import option
from openwafer.data import shards, tokenize
from openwafer.data.config import DataConfig
from openwafer.data.corpus import pull_shakespeare
from openwafer.data.documents import Piece, find_files, read_documents
from openwafer.errors import UserError
from openwafer.registry import cache_dir, staged

DEFAULT_VOCAB_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How documents become tokens."""

    vocab_size: int | None = option(
        None, help=f"train a byte-level BPE of this size (default {DEFAULT_VOCAB_SIZE})", minimum=257
    )
    tokenizer: Path | None = option(None, help="use this tokenizer.json (or its folder) instead")
    end_of_text: str | None = option(None, help="with --tokenizer: the token after each document")
    text_key: str = option("text", help="key of the text in .jsonl records")
    val_fraction: float = option(0.01, help="share of the documents held out", minimum=0, maximum=0.5)

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer is not None:
            raise UserError("give --vocab_size (train a tokenizer) or --tokenizer (use one), not both")

    def is_val(self, document: int) -> bool:
        """Every k-th document is held out, whatever order machines work in."""
        every = round(1 / self.val_fraction) if self.val_fraction > 0 else None
        return every is not None and document % every == every - 1


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was written."""

    folder: Path
    vocab_size: int
    num_documents: int
    train_tokens: int
    val_tokens: int


def prepare(
    inputs: Sequence[str | Path], out: Path, config: PrepareConfig | None = None, *, overwrite: bool = False
) -> Prepared:
    """Tokenize files, folders and glob patterns into a new folder of shards.

    The folder appears whole or not at all. An existing one is an error, or replaced with `overwrite`.
    """
    config = config or PrepareConfig()
    files = find_files(inputs)
    _check_out(out, overwrite)
    encoder = _encoder(files, config)
    retired: Path | None = None
    try:
        with staged(out) as folder:
            # The staging folder is private to its owner; a data set is for everyone the parent is for.
            folder.chmod(0o755)
            prepared = _write(files, folder, out, encoder, config)
            retired = _retire(out) if overwrite else None
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}; nothing was kept") from None
    finally:
        if retired is not None and out.exists():
            shutil.rmtree(retired, ignore_errors=True)
        elif retired is not None:
            retired.rename(out)
    return prepared


def prepared_shakespeare(vocab_size: int = DEFAULT_VOCAB_SIZE) -> Path:
    """The built-in corpus as shards, made on first use and kept in the cache. 5 % is held out."""
    out = cache_dir() / "datasets" / f"shakespeare-{vocab_size}-v{shards.FORMAT}"
    if not out.is_dir():
        prepare([pull_shakespeare()], out, PrepareConfig(vocab_size=vocab_size, val_fraction=0.05))
    return out


def folder_of(config: DataConfig, model_vocab_size: int) -> Path:
    """The folder of shards that a run reads; its vocabulary must fit the model's."""
    if config.path is None:
        folder = prepared_shakespeare(config.vocab_size or min(model_vocab_size, DEFAULT_VOCAB_SIZE))
    else:
        folder = config.path
    vocab_size = shards.read_manifest(folder).vocab_size
    if vocab_size > model_vocab_size:
        raise UserError(
            f"{folder} has token ids up to {vocab_size - 1}, the model's vocab_size is {model_vocab_size}: "
            f"set it to at least {vocab_size}"
        )
    return folder


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{out} exists: choose another --out, or replace it with --overwrite")
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out} was not written by `openwafer data prepare`: remove it yourself")


def _retire(out: Path) -> Path | None:
    """Move the old folder aside, at the last moment before the new one takes its name."""
    if not out.exists():
        return None
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    return out.rename(aside)


def _encoder(files: list[Path], config: PrepareConfig) -> tokenize.TextEncoder:
    if config.tokenizer is not None:
        return tokenize.load(config.tokenizer, config.end_of_text)
    pieces = read_documents(files, config.text_key)
    with _progress("train tokenizer", files) as advance:
        return tokenize.train(_training_texts(pieces, config, advance), config.vocab_size or DEFAULT_VOCAB_SIZE)


def _training_texts(pieces: Iterable[Piece], config: PrepareConfig, advance: Callable[[int], None]) -> Iterator[str]:
    document = 0
    for piece in pieces:
        if not config.is_val(document):
            yield piece.text
        advance(piece.num_bytes)
        document += piece.ends


def _write(
    files: list[Path], folder: Path, out: Path, encoder: tokenize.TextEncoder, config: PrepareConfig
) -> Prepared:
    document = 0
    with contextlib.ExitStack() as stack:
        train, val = (
            stack.enter_context(shards.ShardWriter(folder, split, encoder.vocab_size)) for split in shards.SPLITS
        )
        advance = stack.enter_context(_progress("tokenize", files))
        for piece in encoder.encode(read_documents(files, config.text_key)):
            (val if config.is_val(document) else train).append(piece.ids)
            document += piece.ends
            advance(piece.num_bytes)
        if val.num_tokens == 0:
            # Too few documents to hold out a whole one (often there is one big file): hold out the end.
            train.move_tail(val, math.ceil(train.num_tokens * config.val_fraction))
        if train.num_tokens <= document:
            raise UserError(f"no text in {len(files)} files: nothing to prepare")
        encoder.save(folder / "tokenizer.json")
        shards.write_manifest(folder, encoder.vocab_size, encoder.end_id, {"train": train, "val": val})
        return Prepared(
            folder=out,
            vocab_size=encoder.vocab_size,
            num_documents=document,
            train_tokens=train.num_tokens,
            val_tokens=val.num_tokens,
        )


@contextlib.contextmanager
def _progress(what: str, files: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr over the bytes of the files; nothing when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(path.stat().st_size for path in files)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
