import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.data import tokenize
from openwafer.data.config import DataConfig
from openwafer.data.prepare import PrepareConfig, folder_of, prepare
from openwafer.data.shards import Shards
from openwafer.errors import UserError

SMALL = PrepareConfig(vocab_size=300)


def texts_of(folder, split):
    """The documents of a split, decoded."""
    shards = Shards.open(folder, split)
    encoder = tokenize.load(folder / "tokenizer.json")
    ids = shards.tokens(0, len(shards))
    ends = np.flatnonzero(ids == shards.end_of_text)
    return [encoder.decode(part) for part in np.split(ids, ends + 1)[: len(ends)]]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_text_comes_back_from_shards(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("p")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = PrepareConfig(vocab_size=280, val_fraction=0)
    if not any(documents):
        with pytest.raises(UserError, match="no text"):
            prepare([source], folder / "out", config)
        return
    done = prepare([source], folder / "out", config)
    assert texts_of(folder / "out", "train") == documents
    assert done.num_documents == len(documents)
    assert done.val_tokens == 0
    assert done.train_tokens == len(Shards.open(folder / "out"))


def test_documents_are_held_out_whole(tmp_path):
    lines = [json.dumps({"body": f"document {i}"}) for i in range(40)]
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    config = PrepareConfig(vocab_size=300, text_key="body", val_fraction=0.1)
    prepare([tmp_path], tmp_path / "out", config)
    held_out = [f"document {i}" for i in (9, 19, 29, 39)]
    assert texts_of(tmp_path / "out", "val") == held_out
    everything = {f"document {i}" for i in range(40)}
    assert set(texts_of(tmp_path / "out", "train")) == everything - set(held_out)


def test_one_document_gives_its_end(tmp_path):
    text = "".join(f"line {i} of the play\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    done = prepare([tmp_path / "a.txt"], tmp_path / "out", SMALL)
    assert done.val_tokens == pytest.approx(0.01 * (done.train_tokens + done.val_tokens), abs=1)
    encoder = tokenize.load(tmp_path / "out")
    parts = [Shards.open(tmp_path / "out", split) for split in ("train", "val")]
    assert "".join(encoder.decode(p.tokens(0, len(p))) for p in parts) == text


def test_same_input_same_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    for out in ("one", "two"):
        prepare([tmp_path / "a.txt"], tmp_path / out, SMALL)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_models_tokenizer_is_used_and_kept(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    prepare([tmp_path / "a.txt"], tmp_path / "one", SMALL)
    config = PrepareConfig(tokenizer=tmp_path / "one" / "tokenizer.json")
    prepare([tmp_path / "a.txt"], tmp_path / "two", config)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    with pytest.raises(UserError, match="not both"):
        PrepareConfig(vocab_size=300, tokenizer=tmp_path)


def test_existing_folders(tmp_path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    out = tmp_path / "out"
    prepare([tmp_path / "a.txt"], out, SMALL)
    before = (out / "manifest.json").read_bytes()
    (tmp_path / "a.txt").write_text("other words " * 100)
    with pytest.raises(UserError, match="--overwrite"):
        prepare([tmp_path / "a.txt"], out, SMALL)
    assert (out / "manifest.json").read_bytes() == before
    prepare([tmp_path / "a.txt"], out, SMALL, overwrite=True)
    assert (out / "manifest.json").read_bytes() != before
    assert "other words" in tokenize.load(out).decode(Shards.open(out).tokens(0, 20))
    # Someone's own folder is never deleted.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    with pytest.raises(UserError, match="remove it yourself"):
        prepare([tmp_path / "a.txt"], tmp_path / "home", SMALL, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "home", "out"]


def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path):
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_text('{"text": "fine words"}\n' * 20)
    out = tmp_path / "out"
    prepare([good], out, SMALL)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    bad.write_text('{"text": "fine"}\n{oops\n')
    config = PrepareConfig(tokenizer=out)  # reach the writing before the bad line is met
    with pytest.raises(UserError, match=r"b\.jsonl line 2 is not valid JSON"):
        prepare([good, bad], out, config, overwrite=True)
    with pytest.raises(UserError, match=r"b\.jsonl line 2"):
        prepare([good, bad], tmp_path / "new", config)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out"]


def interrupted(child: subprocess.Popen[str]) -> str:
    """What it says. Ctrl-C in the instant before a read that never returns is not seen: then it is pressed again."""
    for _ in range(10):
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=10)[1]
    raise AssertionError("it does not end")


def test_ctrl_c_leaves_nothing(tmp_path):
    """Interrupted while it reads a pipe that never ends, with part of the tokens written."""
    (tmp_path / "a.txt").write_text("hello " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "tok", SMALL)
    os.mkfifo(tmp_path / "b.txt")
    command = [sys.executable, "-m", "openwafer", "data", "prepare", "--out", str(tmp_path / "out")]
    command += ["--tokenizer", str(tmp_path / "tok"), "--input", str(tmp_path / "a.txt")]
    command += [str(tmp_path / "b.txt")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            with (tmp_path / "b.txt").open("wb") as pipe:  # opens when the child reads: it is at work
                pipe.write(b"some words\n")
                pipe.flush()
                assert list(tmp_path.glob(".out.*"))
                stderr = interrupted(child)
        finally:
            child.kill()
    assert child.returncode == 130
    assert stderr == "openwafer: interrupted\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "tok"]


def test_folder_of_a_run(tmp_path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "out", SMALL)
    vocab_size = Shards.open(tmp_path / "out").vocab_size
    config = DataConfig(path=tmp_path / "out")
    assert folder_of(config, vocab_size) == tmp_path / "out"
    with pytest.raises(UserError, match=f"set it to at least {vocab_size}"):
        folder_of(config, vocab_size - 1)
