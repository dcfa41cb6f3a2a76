import json

import numpy as np
import pytest

from openwafer.data import documents, tokenize
from openwafer.data.documents import Piece
from openwafer.errors import UserError

TEXT = "the cat sat on the mat.\n\nThe mat, it's said, was the cat's.\n" * 20


@pytest.fixture(scope="module")
def encoder():
    return tokenize.train([TEXT], 270)


def ids_of(encoder, *texts):
    pieces = [Piece(text, True, 0) for text in texts]
    return [encoded.ids.tolist() for encoded in encoder.encode(pieces)]


def test_training_is_deterministic_and_has_the_asked_size(encoder):
    again = tokenize.train([TEXT], 270)
    assert again.tokenizer.to_str() == encoder.tokenizer.to_str()
    assert encoder.vocab_size == 270
    assert encoder.end_id == 0


@pytest.mark.parametrize("text", ["", "the cat", "emoji 🦊 and \x00 bytes", "\r\n \t", "<|endoftext|>"])
def test_any_text_comes_back(encoder, text):
    (ids,) = ids_of(encoder, text)
    assert ids[-1] == encoder.end_id
    # A document that spells the end of text must not contain it.
    assert encoder.end_id not in ids[:-1]
    assert encoder.decode(np.array(ids)) == text


def test_pieces_of_a_document_encode_like_the_whole(encoder, monkeypatch):
    (expected,) = ids_of(encoder, TEXT)
    monkeypatch.setattr(documents, "PIECE_CHARS", 40)
    pieces = [Piece(text, ends, 0) for text, ends in documents.split(TEXT)]
    assert len(pieces) > 5
    assert np.concatenate([e.ids for e in encoder.encode(pieces)]).tolist() == expected


def test_groups_do_not_change_tokens(encoder, monkeypatch):
    expected = ids_of(encoder, "the cat", "sat", "on the mat")
    monkeypatch.setattr(tokenize, "_BATCH_CHARS", 1)
    assert ids_of(encoder, "the cat", "sat", "on the mat") == expected


def test_saved_tokenizer_loads_the_same(encoder, tmp_path):
    encoder.save(tmp_path / "tokenizer.json")
    loaded = tokenize.load(tmp_path)
    assert ids_of(loaded, TEXT) == ids_of(encoder, TEXT)
    assert (loaded.end_id, loaded.vocab_size) == (encoder.end_id, encoder.vocab_size)
    # What is saved knows its special tokens, for whoever serves the model.
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("<|endoftext|>").ids == [0]


def test_end_of_text_of_a_models_tokenizer(encoder, tmp_path):
    renamed = encoder.tokenizer.to_str().replace("<|endoftext|>", "<done>")
    (tmp_path / "tokenizer.json").write_text(renamed, encoding="utf-8")
    with pytest.raises(UserError, match="--end_of_text"):
        tokenize.load(tmp_path)
    assert tokenize.load(tmp_path, "<done>").end_id == 0
    with pytest.raises(UserError, match="no token '<other>'"):
        tokenize.load(tmp_path, "<other>")
    config = {"eos_token": {"content": "<done>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenize.load(tmp_path).end_id == 0


def test_wrong_tokenizers(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        tokenize.load(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        tokenize.load(tmp_path)
    with pytest.raises(UserError, match="at least 257"):
        tokenize.train(["x"], 10)
