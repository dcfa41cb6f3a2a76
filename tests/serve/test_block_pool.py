"""Blocks: shared beginnings, counted references, and that nothing leaks whatever happens."""

import hypothesis.strategies as st
from hypothesis import given, settings

from openwafer.serve.block_pool import BlockPool
from openwafer.serve.core import Request, Sampling
from openwafer.serve.sequence import Sequence


def sequence(tokens: list[int], **sampling) -> Sequence:
    request = Request(id="", prompt=tuple(tokens), sampling=Sampling(max_tokens=1, **sampling))
    return Sequence(request=request, on_event=lambda event: None, seed=0, submitted_s=0.0, order=0)


def compute(pool: BlockPool, one: Sequence) -> None:
    pool.adopt_prefix(one)
    assert pool.grow(one, len(one.tokens))
    one.num_computed = len(one.tokens)
    pool.publish(one)


def test_equal_beginnings_share_blocks() -> None:
    pool = BlockPool(10, 4)
    first, second = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]), sequence([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    compute(pool, first)
    pool.adopt_prefix(second)
    assert second.num_computed == 8
    assert second.blocks == first.blocks[:2]
    assert pool.num_free == 7
    pool.release(first)
    assert pool.num_free == 8  # the shared ones stay
    pool.release(second)
    assert pool.num_free == 10


def test_the_last_token_is_always_computed() -> None:
    pool = BlockPool(10, 4)
    compute(pool, sequence([1, 2, 3, 4]))
    again = sequence([1, 2, 3, 4])
    pool.adopt_prefix(again)
    assert again.num_computed == 0


def test_a_block_is_known_by_all_that_leads_to_it() -> None:
    pool = BlockPool(10, 2)
    compute(pool, sequence([1, 2, 3, 4, 5]))
    other = sequence([9, 9, 3, 4, 5])
    pool.adopt_prefix(other)
    assert other.blocks == []


def test_freed_blocks_are_found_again_until_they_are_needed() -> None:
    pool = BlockPool(4, 2)
    first = sequence([1, 2, 3, 4, 5])
    compute(pool, first)
    pool.release(first)
    again = sequence([1, 2, 3, 4, 5])
    pool.adopt_prefix(again)
    assert again.num_computed == 4
    pool.release(again)
    # Three new blocks: the free one that holds nothing, the one with the odd token, and the end of the text.
    other = sequence([7, 7, 7, 7, 7])
    compute(pool, other)
    third = sequence([1, 2, 3, 4, 5])
    pool.adopt_prefix(third)
    assert third.num_computed == 2
    assert not pool.grow(third, 5)
    assert len(third.blocks) == 1


def test_without_the_cache_or_with_prompt_logprobs_nothing_is_shared() -> None:
    for pool, sampling in ((BlockPool(9, 2, prefix_cache=False), {}), (BlockPool(9, 2), {"prompt_logprobs": True})):
        compute(pool, sequence([1, 2, 3, 4, 5]))
        again = sequence([1, 2, 3, 4, 5], **sampling)
        pool.adopt_prefix(again)
        assert again.num_computed == 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_blocks_are_never_lost_nor_given_twice(data: st.DataObject) -> None:
    pool = BlockPool(12, 2)
    held: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        new = sequence(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
        pool.adopt_prefix(new)
        if pool.grow(new, len(new.tokens)):
            new.num_computed = len(new.tokens)
            pool.publish(new)
            held.append(new)
        else:
            pool.release(new)
        # Two may hold the same block only with the same tokens up to its end.
        owner: dict[int, list[int]] = {}
        for one in held:
            for index, block in enumerate(one.blocks):
                tokens = one.tokens[: 2 * (index + 1)]
                assert owner.setdefault(block, tokens) == tokens
        assert pool.num_free == 12 - len(owner)
    for one in held:
        pool.release(one)
    assert pool.num_free == 12
