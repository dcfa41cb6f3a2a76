"""Named tensors into a meta-built module: every mistake in them is found and named."""

import pytest
import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.models.weights import assign


def tied() -> nn.ModuleDict:
    with torch.device("meta"):
        module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    return module


def untied() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"first": nn.Linear(3, 5), "second": nn.Linear(5, 3)})


def test_one_tensor_serves_both_names_of_a_tied_weight():
    weight = torch.randn(5, 3)
    module = tied()
    assert assign(module, [("embed.weight", weight)], "file") is module
    assert module["embed"].weight is module["head"].weight
    assert torch.equal(module.state_dict()["head.weight"], weight)


def test_tensors_are_not_copied_without_a_dtype():
    weight = torch.randn(5, 3)
    module = tied()
    assign(module, [("head.weight", weight)], "file")
    assert module.state_dict()["embed.weight"].data_ptr() == weight.data_ptr()


def test_dtype_converts():
    module = tied()
    assign(module, [("embed.weight", torch.randn(5, 3))], "file", torch.bfloat16)
    assert module["head"].weight.dtype == torch.bfloat16


def test_both_names_of_a_tied_weight_must_agree():
    weight = torch.randn(5, 3)
    assign(tied(), [("embed.weight", weight), ("head.weight", weight.clone())], "file")
    with pytest.raises(UserError, match=r"'embed.weight' and 'head.weight'"):
        assign(tied(), [("embed.weight", weight), ("head.weight", weight + 1)], "file")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("first.weight", torch.ones(5, 3))], r"a\.bin: 3 of 4 tensors are missing: first.bias"),
        ([("third.weight", torch.ones(5, 3))], r"a\.bin: tensor 'third.weight' has no place"),
        ([("first.weight", torch.ones(3, 5))], r"a\.bin: .*'first.weight' has shape \[3, 5\].*\[5, 3\]"),
        ([("first.weight", torch.ones(5, 3, dtype=torch.int8))], r"'first.weight' holds int8"),
    ],
)
def test_mistakes_name_the_file_and_the_tensor(tensors: list, message: str):
    with pytest.raises(UserError, match=message):
        assign(untied(), tensors, "a.bin")
