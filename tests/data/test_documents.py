import gzip
import json

import pytest

from openwafer.data import documents
from openwafer.data.documents import find_files, read_documents, split
from openwafer.errors import UserError


def whole(files, text_key="text"):
    texts, current = [], ""
    for piece in read_documents(files, text_key):
        current += piece.text
        if piece.ends:
            texts.append(current)
            current = ""
    return texts


def test_each_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo é\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "y\\nz", "id": 3}', encoding="utf-8")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "packed"}) + "\n")
    (tmp_path / "ignored.md").write_text("no")
    files = find_files([tmp_path])
    assert [f.name for f in files] == ["a.txt", "b.jsonl", "c.jsonl.gz"]
    assert whole(files) == ["one\r\ntwo é\n", "x", "y\nz", "packed"]
    consumed = sum(piece.num_bytes for piece in read_documents(files, "text"))
    assert consumed == sum(f.stat().st_size for f in files)


def test_files_are_named_once_and_globs_work(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    found = find_files([tmp_path / "b.txt", str(tmp_path / "*.txt"), tmp_path])
    assert [f.name for f in found] == ["b.txt", "a.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "*.jsonl", "page.md"])
def test_wrong_inputs_are_named(tmp_path, name):
    (tmp_path / "page.md").write_text("x")
    with pytest.raises(UserError, match=name.replace("*", r"\*")):
        find_files([tmp_path / name])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": ', "line 2 is not valid JSON"),
        ('{"text": "a"}\n[1]\n', "line 2 must be a JSON object"),
        ('{"body": "a"}\n', "line 1: the key 'text' is missing .keys: 'body'"),
        ('{"text": 3}\n', "line 1: the key 'text' is not text"),
        ('{"text": "\\ud800"}\n', "line 1: .*surrogate"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        whole([path])
    assert str(path) in str(error.value)


def test_damaged_gzip_and_text_are_named(tmp_path):
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 100)[:-12])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz"):
        whole([packed])
    packed.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"a\.jsonl\.gz"):
        whole([packed])
    text = tmp_path / "t.txt"
    text.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"t\.txt is not UTF-8 text: bad byte at offset 3"):
        whole([text])


def test_bad_byte_offset_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 4)
    text = tmp_path / "t.txt"
    text.write_bytes("abcé".encode()[:4] + b"x")
    with pytest.raises(UserError, match="offset 3"):
        whole([text])


def test_long_documents_come_in_pieces_cut_between_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARS", 50)
    text = "".join(f"line {i}\n" + ("\n" if i % 3 == 0 else "") for i in range(200))
    pieces = list(split(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece) <= 100 for piece, _ in pieces)
    assert all(piece.endswith("\n") and not piece.endswith("\n\n") for piece, ends in pieces if not ends)
    path = tmp_path / "long.txt"
    path.write_text(text)
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 64)
    assert whole([path]) == [text]
