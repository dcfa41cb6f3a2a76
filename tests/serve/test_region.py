"""Regions: whole layers, all of them, and the costliest region as cheap as can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwafer.errors import UserError
from openwafer.serve.region import Region, part_of, split
from tests.serve.conftest import CONFIGS


def cost(region: Region, costs: list[float], head: float) -> float:
    return sum(costs[layer] for layer in region.layers) + head * region.has_head


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 30), st.integers(1, 8))
def test_no_other_cut_is_better(sizes: list[int], head: int, num_regions: int) -> None:
    costs = [float(size) for size in sizes]
    num_regions = min(num_regions, len(costs))
    regions = split(costs, float(head), num_regions)
    assert [layer for region in regions for layer in region.layers] == list(range(len(costs)))
    assert [region.embeds for region in regions] == [True] + [False] * (num_regions - 1)
    assert [region.has_head for region in regions] == [False] * (num_regions - 1) + [True]
    worst = max(cost(region, costs, head) for region in regions)
    for cuts in itertools.combinations(range(1, len(costs)), num_regions - 1):
        edges = [0, *cuts, len(costs)]
        others = [Region(first=first, stop=stop, num_layers=len(costs)) for first, stop in itertools.pairwise(edges)]
        assert worst <= max(cost(region, costs, head) for region in others)


def test_a_large_head_is_worth_layers() -> None:
    assert [len(region.layers) for region in split([1.0] * 30, 8.0, 2)] == [19, 11]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="num_csx 3 is more than the 2 layers"):
        split([1.0, 1.0], 0.0, 3)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.1.mlp.up_proj.weight", 1),
        ("transformer.h.0.ln_1.bias", 0),
        ("model.layers.2.mlp.up_proj.weight", "embedding"),  # there is no layer 2: refused with the first region
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("model.norm.weight", "head"),
        ("transformer.ln_f.bias", "head"),
        ("lm_head.weight", "head"),
        ("strange.weight", "embedding"),
    ],
)
def test_every_weight_belongs_somewhere(name: str, part: object) -> None:
    assert part_of(name, CONFIGS["llama"]) == part
