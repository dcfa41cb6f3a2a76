"""Groups on a real Graph."""

import pytest
import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.graph import capture
from openwafer.memoryx.config import GroupConfig
from openwafer.memoryx.groups import with_groups


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return capture(model, (torch.zeros(2, 3),))


def test_frozen_groups_are_not_trained_and_the_first_match_decides(graph) -> None:
    groups = [GroupConfig(match="0.bias"), GroupConfig(match="0.*", frozen=True)]
    weights = with_groups(graph, groups).weights
    assert {name for name, weight in weights.items() if not weight.requires_grad} == {"0.weight"}
    assert all(weight.requires_grad for weight in graph.weights.values()), "the graph itself is as it was"


def test_mistakes(graph) -> None:
    with pytest.raises(UserError, match=r"no weight is called '2\.wieght': the nearest are 2\.weight"):
        with_groups(graph, [GroupConfig(match=("0.*", "2.wieght"))])
    with pytest.raises(UserError, match="every weight is frozen"):
        with_groups(graph, [GroupConfig(match="*", frozen=True)])
