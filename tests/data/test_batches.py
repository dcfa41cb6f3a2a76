import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwafer.data.batches import Batches, permuted
from openwafer.data.shards import Shards, ShardWriter, write_manifest
from openwafer.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    writers = {split: ShardWriter(folder, split, 1000, 64) for split in ("train", "val")}
    writers["train"].append(np.arange(1000))
    (folder / "tokenizer.json").write_text("{}")
    write_manifest(folder, 1000, 0, writers)
    return Shards.open(folder)


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_covers_everything_once(size, key):
    out = permuted(np.arange(size), size, np.full(size, key, dtype=np.uint64))
    assert sorted(out.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**31 + 11, 10**12])
def test_permutation_of_huge_sizes_needs_no_memory(size):
    some = np.linspace(0, size - 1, 5000, dtype=np.int64)
    out = permuted(some, size, np.full(some.size, 7, dtype=np.uint64))
    assert out.min() >= 0
    assert out.max() < size
    assert len(set(out.tolist())) == some.size
    # Spread over the whole range, as a shuffle is.
    counts = np.histogram(out, bins=10, range=(0, size))[0]
    assert counts.min() > 400


def test_shuffle_leaves_no_trace_of_the_order():
    size = 4000
    out = permuted(np.arange(size), size, np.full(size, 3, dtype=np.uint64))
    assert abs(np.corrcoef(np.arange(size), out)[0, 1]) < 0.06
    assert np.sum(np.diff(out) == 1) < 10


def test_golden_order():
    """Runs resume across versions: this order must never change."""
    out = permuted(np.arange(10), 10, np.full(10, 42, dtype=np.uint64))
    assert out.tolist() == [5, 3, 9, 4, 7, 2, 1, 8, 0, 6]


@given(context=st.integers(5, 120), batch_size=st.integers(1, 40), seed=st.integers(-5, 2**70))
@settings(max_examples=40, deadline=None)
def test_every_sample_once_per_epoch_also_across_borders(shards, context, batch_size, seed):
    batches = Batches(shards, context, batch_size, seed)
    count = batches.num_samples
    assert count == 999 // context
    stream = np.concatenate([batches.samples(step) for step in range(-(-3 * count // batch_size))])
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


@given(steps=st.lists(st.integers(0, 500), min_size=1, max_size=6), context=st.integers(1, 99))
@settings(max_examples=25, deadline=None)
def test_a_step_is_the_same_in_any_call_order_and_after_a_resume(shards, steps, context):
    first = Batches(shards, context, 4, seed=9)
    seen = {step: first.at(step) for step in steps}
    for step in sorted(seen):
        again = Batches(shards, context, 4, seed=9).at(step)
        for key in ("input_ids", "labels"):
            assert np.array_equal(seen[step][key], again[key])


def test_labels_follow_inputs(shards):
    batch = Batches(shards, 16, 5, seed=1).at(3)
    assert batch["input_ids"].shape == batch["labels"].shape == (5, 16)
    assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64
    # The tokens are 0..999 in order, so the next token is one more.
    assert np.array_equal(batch["labels"], batch["input_ids"] + 1)
    assert (batch["input_ids"][:, 0] % 16 == 0).all()


def test_rows_are_a_workers_share(shards):
    batches = Batches(shards, 10, 6)
    whole = batches.at(2)["labels"]
    parts = [batches.at(2, rows)["labels"] for rows in (range(0, 1), range(1, 4), range(4, 6))]
    assert np.array_equal(np.concatenate(parts), whole)


def test_seeds_and_epochs_differ(shards):
    order = [Batches(shards, 10, 99, seed).samples(step).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(o) for o in order}) == 4


def test_batch_larger_than_the_data(shards):
    samples = Batches(shards, 500, 7).samples(10**15)
    assert sorted(set(samples.tolist())) == [0]
    samples = Batches(shards, 333, 9).samples(0)
    assert [sorted(samples[i : i + 3].tolist()) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_too_little_data(shards):
    with pytest.raises(UserError, match=r"1000 train tokens, fewer than one sample of 1000 \+ 1"):
        Batches(shards, 1000, 1)
    with pytest.raises(UserError, match="at least 1"):
        Batches(shards, 0, 1)
