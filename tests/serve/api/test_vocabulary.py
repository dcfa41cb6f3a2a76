"""Token bytes, and the quick text stream against the definition."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from openwafer.models.tokenizer import TextStream, Tokenizer
from openwafer.serve.api.vocabulary import Vocabulary
from tests.serve.script_server import TOKENIZER


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30) | st.text().map(TOKENIZER.encode))
def test_quick_stream_is_the_definition(ids: list[int]):
    quick, slow = Vocabulary(TOKENIZER).text_stream(), TextStream(TOKENIZER)
    ours = "".join(map(quick, ids))
    theirs = "".join(map(slow.push, ids))
    # The definition holds back up to three replacement characters at the end, valid or not.
    assert ours.rstrip("\ufffd") == theirs.rstrip("\ufffd")


def test_bytes_of_tokens():
    vocabulary = Vocabulary(TOKENIZER)
    ids = TOKENIZER.encode("aé😀")
    assert b"".join(map(vocabulary.bytes_of, ids)) == "aé😀".encode()
    assert vocabulary.bytes_of(1) == b"<|im_end|>"
    assert vocabulary.bytes_of(10_000) == b""
    assert "".join(map(vocabulary.text_stream(), [*ids, 0])) == "aé😀"


def test_byte_fallback_vocabulary():
    vocab = {"<unk>": 0, "▁hi": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("<tool_call>", special=False)])
    vocabulary = Vocabulary(Tokenizer(backend))
    assert not vocabulary.is_byte_level
    assert [vocabulary.bytes_of(i) for i in range(1, 6)] == [b" hi", b"\xc3", b"\xa9", "é".encode(), b"<tool_call>"]
    assert "".join(map(vocabulary.text_stream(), [1, 2, 3])) == " hié"
