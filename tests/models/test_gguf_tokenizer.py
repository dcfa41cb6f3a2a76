"""Tokenizers in GGUF metadata, against the libraries that made them and against SmolLM2's in transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import pre_tokenizers

from openwafer.errors import UserError
from openwafer.models.gguf_tokenizer import tokenizer_from_gguf
from openwafer.models.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "hello 1234567890 3.14 2026-01-02",
    "  two spaces, a\ttab and\r\nnew\n\n\nlines  ",
    "It's we've I'll you'd THEY'RE",
    "naïve café Ünïcödé ﬁ ß",
    "日本語 한국어 العربية हिन्दी",
    "🙂 👨‍👩‍👧‍👦 🇫🇷 e\u0301",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a" * 200,
]


def _bpe(**changes: Any) -> dict[str, Any]:
    merges = ["1 2", "12 3", "123 4", "Ġ Ġ", "a b"]
    tokens = ["<|bos|>", "<|eot_id|>", "<tool>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items() if v is not None}


def _read(write_gguf, metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(write_gguf("llama", metadata, {"t": [0.0]}))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        # How "  1234" is cut is where the families differ.
        ("gpt-2", ["Ġ", "Ġ", "1234"]),
        ("default", ["Ġ", "Ġ", "1234"]),
        ("smollm", ["ĠĠ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers(write_gguf, pre: str, pieces: list[str]):
    tokenizer = _read(write_gguf, _bpe(pre=pre))
    assert tokenizer.backend.encode("  1234").tokens == pieces
    for text in TEXTS[:-3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text or pre == "qwen2"


def test_special_tokens(write_gguf):
    tokenizer = _read(write_gguf, _bpe(add_bos_token=True))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (0, 1))  # <|eot_id|> ends a turn, the file or not
    ids = tokenizer.encode("ab<tool><|eot_id|>", add_special=True)
    assert ids == [0, tokenizer.backend.token_to_id("ab"), 2, 1]
    assert tokenizer.decode(ids) == "ab<tool>"
    assert tokenizer.encode("ab") == ids[1:2]


def _sentence_piece(**changes: Any) -> dict[str, Any]:
    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0}
    pieces |= {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    # "abc" can be made of "ab" + "c" or "a" + "bc"; the scores prefer "bc".
    for rank, piece in enumerate(["bc", "ab", "abc", "▁a", "▁", "a", "b", "c"]):
        pieces[piece] = -float(rank)
    values = {
        "model": "llama",
        "tokens": list(pieces),
        "scores": list(pieces.values()),
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 8],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items()}


def test_sentence_piece(write_gguf):
    tokenizer = _read(write_gguf, _sentence_piece())
    assert tokenizer.backend.encode("abx", add_special_tokens=False).tokens == ["▁", "ab", "<0x78>"]
    assert tokenizer.backend.encode("bcab", add_special_tokens=False).tokens == ["▁", "bc", "ab"]
    assert tokenizer.encode("a", add_special=True)[0] == 1  # begins every text unless the file says no
    assert tokenizer.eos_ids == (2,)
    for text in ["abc cab", "é 🙂 zz", " a  b ", "<s>"]:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_sentence_piece_without_prefix(write_gguf):
    tokenizer = _read(write_gguf, _sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.backend.encode("bc a").tokens == ["bc", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (_bpe(model="wordpiece"), "unknown tokenizer 'wordpiece'"),
        (_bpe(model=["gpt2"]), "unknown tokenizer"),
        (_bpe(pre="gpt2"), "did you mean 'gpt-2'"),
        (_bpe(merges=["a zz"]), "not in its vocabulary"),
        (_bpe(merges=["ab"]), "not in its vocabulary"),
        (_bpe(merges=None), "tokenizer.ggml.merges"),
        (_bpe(tokens=["a", "a"]), "lists a token twice"),
        (_bpe(tokens=[1, 2]), "no list of texts"),
        (_bpe(bos_token_id=10**6), "bos_token_id is 1000000"),
        (_bpe(token_type=[1]), "token_type for each"),
        (_sentence_piece(scores=[0.0]), "one tokenizer score"),
        (_sentence_piece(scores=["x"] * 267), "one tokenizer score"),
    ],
)
def test_bad_metadata(write_gguf, metadata: dict[str, Any], reason: str):
    with pytest.raises(UserError, match=reason):
        _read(write_gguf, metadata)


@pytest.mark.network
def test_smollm2_as_in_transformers(smollm2_path: Path):
    ours = tokenizer_from_gguf(smollm2_path)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text), skip_special=False) == text
    messages = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "ho"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == expected
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, (2, 0), 49152)


@pytest.mark.network
def test_smollm2_cuts_digits_first(smollm2_path: Path):
    """The rule the file names (`smollm`); transformers ignores it and joins a digit to the space before."""
    tokenizer = tokenizer_from_gguf(smollm2_path)
    assert tokenizer.backend.encode("x  12").tokens == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.backend.encode("a ½").tokens[:2] == ["a", "Ġ"]
