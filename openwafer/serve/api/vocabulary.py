"""Tokens as bytes, and text from tokens that arrive one at a time.

A token of a byte-level vocabulary is a string of bytes, and text is those strings put together: a table and
an incremental UTF-8 decoder do it in a microsecond. Other vocabularies go through `TextStream`, the
definition that a test compares the table with.
"""

import codecs
import json
import re
from collections.abc import Callable

from openwafer.models.tokenizer import TextStream, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The tokens of a tokenizer as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[int, bytes] = {}
        # With a large vocabulary the description takes a hundred megabytes: only what is needed is kept.
        description = json.loads(tokenizer.backend.to_str())
        self.is_byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"
        added = description.get("added_tokens") or []
        self._added = {token["id"]: token["content"] for token in added}
        self._special = {token["id"] for token in added if token["special"]}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; special tokens as they are spelled, ids beyond the vocabulary as nothing."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        spelled = self.tokenizer.backend.id_to_token(token)
        if spelled is None:
            return b""
        if self.is_byte_level:
            return b"".join(_BYTES.get(char) or char.encode() for char in spelled)
        if match := _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(match[1], 16)])
        return spelled.replace("\u2581", " ").encode()

    def text_of(self, token: int) -> str:
        """A token for people to read; bytes that are no whole character are shown as replacement characters."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def text_stream(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes."""
        if not self.is_byte_level:
            return TextStream(self.tokenizer).push
        return self._byte_level_stream()

    def _byte_level_stream(self) -> Callable[[int], str]:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        cache, special, look_up = self._cache, self._special, self.bytes_of

        def push(token: int) -> str:
            if token in special:
                return ""
            return decode(cache.get(token) or look_up(token))

        return push


def _byte_alphabet() -> dict[str, bytes]:
    """The printable characters that byte-level vocabularies spell bytes with: most bytes are their own."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): bytes([byte]) for byte in plain}
    return alphabet | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
