"""The tokenizer inside a GGUF file: vocabulary, merges or scores, and how text is cut before merging."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from openwafer.config import unknown
from openwafer.models.gguf_file import GgufFile
from openwafer.models.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token_type: matched whole, control tokens are also invisible
# Files name one end token, models use several (SmolLM2: <|im_end|> after a turn, <|endoftext|> after a text).
_ENDS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>"}

# How the families cut text before merging; they differ in digits, contractions and line ends.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """The tokenizer described by the file's metadata."""
    file = GgufFile(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        file.fail(unknown(f"tokenizer {kind!r}", str(kind), BUILDERS))
    tokens = _strings(file, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if not vocab or len(vocab) != len(tokens):
        file.fail("its vocabulary is empty or lists a token twice")
    backend = BUILDERS[kind](file, vocab)
    special = _add_tokens(file, backend, tokens)
    # Without the key llama.cpp starts SentencePiece texts, and no others, with the begin token.
    bos_id = _token_id(file, "bos_token_id", tokens)
    if bos_id is not None and file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        # Named BOS here because the token's own text may mean something in a template.
        begin = {"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}
        backend.post_processor = processors.TemplateProcessing(single="BOS $A", special_tokens=[begin])
    eos_ids = [_token_id(file, f"{name}_token_id", tokens) for name in ("eos", "eot", "eom")]
    eos_ids += [vocab[token] for token in special if token in _ENDS]
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        chat_template=template if isinstance(template, str) else None,
        bos_id=bos_id,
        eos_ids=[token_id for token_id in eos_ids if token_id is not None],
    )


def _byte_level_bpe(file: GgufFile, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _strings(file, "merges"))]
    if not all(left in vocab and right in vocab and left + right in vocab for left, right in merges):
        file.fail("its tokenizer merges tokens that are not in its vocabulary")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        file.fail(unknown(f"pre-tokenizer {pre!r}", str(pre), PRE_TOKENIZERS))
    # Llama 3 takes a piece that is a token as a whole before it tries to merge.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GgufFile, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocab) or any(isinstance(score, str) for score in scores):
        file.fail(f"it must have one tokenizer score for each of its {len(vocab)} tokens")
    unknown_id = _token_id(file, "unknown_token_id", list(vocab))
    model = models.BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores),
        unk_token=None if unknown_id is None else list(vocab)[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


BUILDERS: dict[str, Callable[[GgufFile, dict[str, int]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentence_piece,
}


def _merges_from_scores(vocab: dict[str, int], scores: list[Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores best: every way to split every piece.

    Pieces of equal score keep the order of their ids.
    """
    ranked = sorted(vocab.items(), key=lambda item: (-float(scores[item[1]]), item[1]))
    merges = []
    for piece, _ in ranked:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(left, right) for left, right in halves if left in vocab and right in vocab]
    return merges


def _add_tokens(file: GgufFile, backend: tokenizers.Tokenizer, tokens: list[str]) -> list[str]:
    """Register the tokens that are matched whole; gives the special ones."""
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        file.fail(f"it must have one tokenizer.ggml.token_type for each of its {len(tokens)} tokens")
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    whole = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])
    return special


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        file.fail(f"its metadata has no list of texts tokenizer.ggml.{key}")
    return value


def _token_id(file: GgufFile, key: str, tokens: list[str]) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        file.fail(f"tokenizer.ggml.{key} is {value!r}, not one of its {len(tokens)} tokens")
    return value
