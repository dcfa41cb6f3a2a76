"""Tokenizers from folders, JSON files and GGUF metadata; chat templates; streaming."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from openwafer.errors import UserError
from openwafer.models.chat_template import render
from openwafer.models.tokenizer import TextStream, Tokenizer


def _backend() -> tokenizers.Tokenizer:
    """Bytes as tokens, with <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<end>")])
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _backend().save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    return tmp_path


def test_other_threads_go_on_while_a_long_text_is_encoded_and_decoded():
    tokenizer = Tokenizer(_backend())
    text, ids = "one two, " * 40_000, []
    for work in (lambda: ids.extend(tokenizer.encode(text)), lambda: ids.append(tokenizer.decode(ids))):
        thread, turns = threading.Thread(target=work), [time.monotonic()]
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            turns.append(time.monotonic())
        # A turn that takes most of the time is one that had to wait for the end.
        assert max(b - a for a, b in pairwise(turns)) < 0.6 * (turns[-1] - turns[0])
    assert ids.pop() == text
    assert ids == tokenizer.backend.encode(text).ids


def test_folder(folder: Path):
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (256, (257, 258), 259)
    ids = tokenizer.encode("<s>né</s>")
    assert ids[0] == 256
    assert ids[-1] == 257
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "né"
    assert tokenizer.decode(ids, skip_special=False) == "<s>né</s>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_template_file_wins(folder: Path):
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "file x"


def test_named_templates(folder: Path):
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(folder).chat_template == "d"


def test_bare_json_has_no_template(folder: Path):
    tokenizer = Tokenizer.from_json(folder / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize("text", ["{", "{}", '{"model": 3}', "\0"])
def test_broken_json(folder: Path, text: str):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_no_tokenizer(tmp_path: Path):
    with pytest.raises(UserError, match=r"no tokenizer\.json in"):
        Tokenizer.from_folder(tmp_path)


def test_undecodable_text():
    with pytest.raises(UserError, match="not valid UTF-8"):
        Tokenizer(_backend()).encode("\udcff")


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60))
def test_stream_gives_whole_characters(text: str):
    tokenizer = Tokenizer(_backend())
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    # U+FFFD itself cannot be told from an unfinished character while it is the last thing said.
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text)).rstrip("\ufffd") or "\ufffd" in text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_stream_of_bytes_that_are_not_text():
    tokenizer = Tokenizer(_backend())
    broken = tokenizer.encode("é")[:1] * 6 + tokenizer.encode("ok")
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token_id) for token_id in broken) == "\ufffd" * 6 + "ok"


def test_stream_drops_an_unfinished_end():
    tokenizer = Tokenizer(_backend())
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token_id) for token_id in tokenizer.encode("a🙂")[:-1]) == "a"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% if %}",
        "{{ none.x.y }}",
    ],
)
def test_bad_templates(template: str):
    with pytest.raises(UserError, match="chat template"):
        render(template, messages=[])


def test_template_features():
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% for i in [1, 2] %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}x{{ y }}{% endgeneration %}", y=1) == "x1"
