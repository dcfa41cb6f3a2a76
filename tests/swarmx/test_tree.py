"""The tree of micro-batch sums is what it is defined to be, for any number of leaves and any split."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from openwafer.swarmx.share import share_of
from openwafer.swarmx.tree import RangeSum, TreeSum, combine, nodes_of, tree_sum


def leaves_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(7, generator=generator) * 10.0 ** (k % 5) for k in range(count)]


@given(st.integers(1, 70))
def test_streaming_equals_the_definition(count: int) -> None:
    leaves = leaves_of(count)
    running = TreeSum()
    for leaf in leaves:
        running.add(leaf)
    assert torch.equal(running.total(), tree_sum(leaves))


def test_it_is_not_a_plain_sum() -> None:
    leaves = leaves_of(37)
    plain = leaves[0]
    for leaf in leaves[1:]:
        plain = plain + leaf
    assert not torch.equal(plain, tree_sum(leaves))
    torch.testing.assert_close(plain, tree_sum(leaves), rtol=1e-5, atol=1e-2)


def test_the_leaves_are_left_alone() -> None:
    leaves = leaves_of(6)
    before = [leaf.clone() for leaf in leaves]
    running = TreeSum()
    for leaf in leaves:
        running.add(leaf)
    running.total()
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


@given(st.integers(1, 40), st.data())
def test_any_split_over_workers_gives_the_same_bits(count: int, data: st.DataObject) -> None:
    leaves = leaves_of(count)
    num_workers = data.draw(st.integers(1, count))
    parts = {}
    for worker in range(num_workers):
        share = share_of(count, num_workers, worker)
        assert len(share) in (count // num_workers, count // num_workers + 1)
        mine = RangeSum(count, share)
        for index in share:
            mine.add(leaves[index])
        assert list(mine.parts()) == nodes_of(count, share)
        parts |= mine.parts()
    assert torch.equal(combine(count, parts), tree_sum(leaves))


def test_a_worker_holds_few_parts() -> None:
    for total in (5, 64, 100):
        for start in range(total):
            for stop in range(start + 1, total + 1):
                assert len(nodes_of(total, range(start, stop))) <= 2 * total.bit_length()
