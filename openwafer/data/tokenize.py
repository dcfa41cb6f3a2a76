"""Text to token ids: train a byte-level BPE, or take a model's own tokenizer.json."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openwafer.data.documents import Piece
from openwafer.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_BATCH_CHARS = 1 << 22
# Merges settle long before a gigabyte; reading more would only cost time.
_TRAIN_CHARS = 1 << 30


@dataclass(frozen=True)
class Encoded:
    """Tokens of one piece (int64 [n], the end-of-text id included if `ends`)."""

    ids: np.ndarray
    ends: bool
    num_bytes: int


class TextEncoder:
    """A tokenizer and the id that it puts after each document."""

    def __init__(self, tokenizer: "Tokenizer", end_of_text: str):
        end_id = tokenizer.token_to_id(end_of_text)
        if end_id is None:
            raise UserError(f"the tokenizer has no token {end_of_text!r}: name one with --end_of_text")
        self.tokenizer = tokenizer
        self.end_id: int = end_id
        # Ids may have gaps, so the number of entries is not enough.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._json = tokenizer.to_str()
        # A document that spells out a special token must not be able to end itself.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, pieces: Iterable[Piece]) -> Iterator[Encoded]:
        """Tokens of each piece, in order; holds a few megabytes of text at a time."""
        for group in _groups(pieces):
            encodings = self.tokenizer.encode_batch_fast([p.text for p in group], add_special_tokens=False)
            for piece, encoding in zip(group, encodings, strict=True):
                ids = [*encoding.ids, self.end_id] if piece.ends else encoding.ids
                yield Encoded(np.asarray(ids, dtype=np.int64), piece.ends, piece.num_bytes)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """The tokenizer as it was given, without our settings for encoding."""
        path.write_text(self._json, encoding="utf-8")


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        group.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _BATCH_CHARS or len(group) >= 4096:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


def train(texts: Iterable[str], vocab_size: int) -> TextEncoder:
    """A byte-level BPE of at most `vocab_size` tokens: 256 bytes, the end of text, and merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"vocab_size must be at least 257 (256 bytes and the end of text), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Sorted: the alphabet comes in no fixed order, and ids follow it.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_at_most(texts, _TRAIN_CHARS), trainer=trainer)
    return TextEncoder(tokenizer, END_OF_TEXT)


def _at_most(texts: Iterable[str], limit_chars: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit_chars -= len(text)
        if limit_chars <= 0:
            return


def load(path: Path, end_of_text: str | None = None) -> TextEncoder:
    """The tokenizer.json at `path` (the file, or a folder with it).

    Its end of text is `end_of_text`, else the eos_token of the tokenizer_config.json beside it, else one of
    the usual names.
    """
    from tokenizers import Tokenizer

    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no such file: {path} (expected a tokenizer.json or the folder of one)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer.json: {error}") from None
    return TextEncoder(tokenizer, end_of_text or _end_of_text(path, tokenizer))


def _end_of_text(path: Path, tokenizer: "Tokenizer") -> str:
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"cannot read {config}: {error}") from None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    for token in _KNOWN_ENDS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise UserError(f"{path} has none of {', '.join(_KNOWN_ENDS)}: name its end of text with --end_of_text")
