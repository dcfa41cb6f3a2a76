"""Text to token ids and back, with the chat template that came with the model.

`Tokenizer.from_folder` reads a Hugging Face folder, `Tokenizer.from_json` any tokenizer.json;
`gguf_tokenizer.tokenizer_from_gguf` builds one from a GGUF file's metadata.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openwafer.errors import UserError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A `tokenizers.Tokenizer` and what chat needs around it.

    `eos_ids` are all ids that end a text or a turn. `bos_id` and `chat_template` are None where the model
    has none.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        chat_template: str | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """The ids of `text`; special tokens spelled out in it become their ids.

        `add_special` also adds what the model wants around every text (usually a begin token).
        """
        if not _is_unicode(text):
            raise UserError("the text is not valid UTF-8: check the encoding of its terminal or file")
        # As a batch, because the library lets other threads go on only then: a megabyte takes it a second.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text the model was trained on; encode it without `add_special`."""
        from openwafer.models.chat_template import render

        if self.chat_template is None:
            raise UserError("this model has no chat template: give it plain text to continue instead")
        special = {"bos_token": self._text_of(self.bos_id)}
        special["eos_token"] = self._text_of(self.eos_ids[0] if self.eos_ids else None)
        return render(
            self.chat_template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **special | variables,
        )

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self.backend.id_to_token(token_id) or ""

    @property
    def settings(self) -> dict[str, Any]:
        """What a tokenizer.json does not hold, as JSON."""
        return {"chat_template": self.chat_template, "bos_id": self.bos_id, "eos_ids": list(self.eos_ids)}

    @classmethod
    def from_json(cls, path: Path, settings: dict[str, Any] | None = None) -> "Tokenizer":
        """A bare tokenizer.json; without `settings` there is no chat template and no begin and end ids."""
        return cls(read_backend(path), **settings or {})

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder."""
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"no tokenizer.json in {folder}: the folder has no tokenizer that can be read")
        backend = read_backend(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json")
        eos_ids = _as_list(_read_json(folder / "generation_config.json").get("eos_token_id"))
        for name in ("eos_token", "bos_token"):
            settings[name] = _token_id(backend, settings.get(name))
        return cls(
            backend,
            chat_template=_folder_template(folder, settings),
            bos_id=settings["bos_token"],
            eos_ids=[i for i in [settings["eos_token"], *eos_ids] if isinstance(i, int)],
        )


class TextStream:
    """Text from ids that arrive one at a time; a character split over several ids is held until whole.

    One that is still unfinished when the ids end is never shown.
    """

    # Ids kept as context once their text is out: some decoders treat the first id of a text specially.
    _CONTEXT = 8
    # The bytes of an unfinished UTF-8 character decode to at most this many replacement characters.
    _UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # characters of the decoded window that were given out

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        stop = len(text)
        while stop > len(text) - self._UNFINISHED and text[stop - 1 : stop] == "\ufffd":
            stop -= 1
        new = text[self._shown : stop]
        self._shown = max(self._shown, stop)
        if stop == len(text) and len(self._ids) > 2 * self._CONTEXT:
            self._ids = self._ids[-self._CONTEXT :]
            self._shown = len(self._tokenizer.decode(self._ids))
        return new


def read_backend(path: Path) -> "tokenizers.Tokenizer":
    """A tokenizer.json as the `tokenizers` library reads it."""
    import tokenizers

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower than Exception
        raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over the template inside tokenizer_config.json, as in Hugging Face."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_id(backend: "tokenizers.Tokenizer", token: Any) -> int | None:
    """The id of a token written as text or as {"content": text, ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates, which is how Python carries undecodable bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
