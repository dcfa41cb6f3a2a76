import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.data.shards import Shards, ShardWriter, write_manifest
from openwafer.errors import UserError


def write(folder, ids, *, vocab_size=1000, shard_tokens=10, val=(1, 2, 3)):
    folder.mkdir(exist_ok=True)
    writers = {}
    for split, tokens in (("train", ids), ("val", val)):
        writers[split] = ShardWriter(folder, split, vocab_size, shard_tokens)
        # In uneven parts, as documents come.
        for part in np.array_split(np.asarray(tokens, dtype=np.int64), 3):
            writers[split].append(part)
    (folder / "tokenizer.json").write_text("{}")
    write_manifest(folder, vocab_size, 0, writers)
    return folder


@settings(deadline=None, max_examples=50)
@given(num_tokens=st.integers(1, 60), shard_tokens=st.integers(1, 25), vocab=st.sampled_from([60, 65536, 70000]))
def test_any_run_reads_back_across_files(tmp_path_factory, num_tokens, shard_tokens, vocab):
    ids = np.arange(num_tokens) + (vocab - 60)
    folder = write(tmp_path_factory.mktemp("s"), ids, vocab_size=vocab, shard_tokens=shard_tokens)
    shards = Shards.open(folder)
    assert len(shards) == num_tokens
    assert len(list(folder.glob("train-*.bin"))) == -(-num_tokens // shard_tokens)
    for start in range(num_tokens + 1):
        run = shards.tokens(start, num_tokens - start)
        assert run.dtype == np.int64
        assert run.tolist() == ids[start:].tolist()
        assert shards.tokens(0, start).tolist() == ids[:start].tolist()


def test_reading_outside_is_an_error(tmp_path):
    shards = Shards.open(write(tmp_path / "s", range(20)))
    for start, length in ((-1, 2), (19, 2), (21, 0)):
        with pytest.raises(IndexError):
            shards.tokens(start, length)


@pytest.mark.parametrize("tail", [0, 1, 9, 10, 11, 25, 27])
def test_move_tail(tmp_path, tail):
    with ShardWriter(tmp_path, "train", 100, 10) as train, ShardWriter(tmp_path, "val", 100, 10) as val:
        train.append(np.arange(27))
        val.append(np.array([50]))
        train.move_tail(val, tail)
        assert (train.num_tokens, val.num_tokens) == (27 - tail, 1 + tail)

        def contents(writer):
            return [i for name in writer.close() for i in np.fromfile(tmp_path / name, "<u2").tolist()]

        assert contents(train) == list(range(27 - tail))
        assert contents(val) == [50, *range(27 - tail, 27)]
        train.append(np.array([99]))
        assert contents(train) == [*range(27 - tail), 99]


def damage_truncate(folder):
    path = folder / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return path


def damage_flip(folder):
    path = folder / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    return path


def damage_missing(folder):
    (folder / "train-00000.bin").unlink()
    return folder / "train-00000.bin"


def damage_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    return folder / "tokenizer.json"


def damage_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])
    return path


def damage_no_manifest(folder):
    (folder / "manifest.json").unlink()
    return folder / "manifest.json"


def edited(**changes):
    def damage(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return path

    return damage


OUTSIDE = {"train": [{"file": "../x", "tokens": 1, "sha256": ""}], "val": []}


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_flip,
        damage_missing,
        damage_tokenizer,
        damage_manifest,
        damage_no_manifest,
        edited(format=2),
        edited(dtype="float32"),
        edited(splits=None),
        edited(splits=OUTSIDE),
        edited(vocab_size="many"),
        edited(tokenizer="/etc/passwd"),
    ],
)
def test_damage_is_an_error_that_names_the_file(tmp_path, damage):
    folder = write(tmp_path / "s", range(20))
    Shards.open(folder)
    path = damage(folder)
    with pytest.raises(UserError) as error:
        Shards.open(folder)
    assert str(path) in str(error.value)


def test_unverified_shards_still_refuse_ids_beyond_the_vocabulary(tmp_path):
    folder = write(tmp_path / "s", range(20))
    (folder / "train-00001.bin").write_bytes(b"\xff" * 20)
    shards = Shards.open(folder, verify=False)
    assert shards.tokens(0, 10).tolist() == list(range(10))
    with pytest.raises(UserError, match=r"train-00001\.bin is damaged"):
        shards.tokens(5, 10)


def test_splits_that_are_not_there(tmp_path):
    folder = write(tmp_path / "s", range(20), val=())
    with pytest.raises(UserError, match="no val tokens"):
        Shards.open(folder, "val")
    with pytest.raises(UserError, match="must be one of train, val, got 'test'"):
        Shards.open(folder, "test")
    with pytest.raises(UserError, match="no such folder"):
        Shards.open(tmp_path / "none")
