"""Deferred modules allocate nothing and are made by their own initialisation, one weight at a time."""

import resource

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from openwafer.errors import UserError
from openwafer.graph.deferred import deferred, initialise
from openwafer.graph.randomness import seed_of, seeded


class Odd(nn.Module):
    """Initialisation that goes through views, other tensors and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 6))
        nn.init.orthogonal_(self.weight)
        with torch.no_grad():
            self.weight[2:4].mul_(3.0)
            self.weight[:, 0] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        self.tied = self.weight
        self.register_buffer("angles", 1.0 / 100.0 ** (torch.arange(0, 6, 2) / 6))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.linear = nn.Linear(6, 6)


def all_names(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]


def test_a_weight_is_what_the_module_would_have_made() -> None:
    with deferred():
        module = Odd()
    assert all(isinstance(p, FakeTensor) for p in module.parameters())
    made = dict(initialise(module, all_names(module), seed=5))
    with seeded(5, "weight"), torch.no_grad():
        expected = nn.init.orthogonal_(torch.empty(8, 6))
        expected[2:4].mul_(3.0)
        expected[:, 0] = torch.arange(1.0, 9.0)
    assert torch.equal(made["weight"], expected)
    with seeded(5, "linear.weight"):
        assert torch.equal(made["linear.weight"], nn.Linear(6, 6, bias=False).weight)
    real = Odd()
    assert torch.equal(made["angles"], real.angles)
    assert torch.equal(made["mask"], real.mask)


def test_order_and_company_do_not_matter() -> None:
    with deferred():
        module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    names = all_names(module)
    forwards = dict(initialise(module, names, seed=1))
    backwards = dict(initialise(module, reversed(names), seed=1))
    assert all(torch.equal(forwards[name], backwards[name]) for name in names)
    other = dict(initialise(module, names, seed=2))
    assert not torch.equal(forwards["0.weight"], other["0.weight"])
    assert torch.equal(forwards["1.weight"], torch.ones(7))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_transformers_models_keep_their_own_initialisation(family: str) -> None:
    config = {
        "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=32),
        "llama": transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97),
        "bert": transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97),
    }[family]
    with deferred():
        module = transformers.AutoModel.from_config(config)
    torch.manual_seed(0)
    real = transformers.AutoModel.from_config(config)
    made = dict(initialise(module, all_names(module), seed=0))
    for name, tensor in [*real.named_parameters(), *real.named_buffers()]:
        ours, theirs = made[name].double(), tensor.detach().double()
        if theirs.numel() > 1 and theirs.std() > 0 and theirs.dim() > 1 and "position_ids" not in name:
            assert ours.std() == pytest.approx(theirs.std().item(), rel=0.2), name
            assert abs(ours.mean() - theirs.mean()) < 0.3 * theirs.std(), name
        else:
            assert torch.equal(ours, theirs), name


def test_nothing_is_allocated() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with deferred():
        module = nn.Sequential(*(nn.Linear(20000, 20000) for _ in range(20)))  # 32 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert sum(p.numel() for p in module.parameters()) > 8e9


def test_a_module_with_values_keeps_them() -> None:
    module = nn.Linear(3, 3)
    assert torch.equal(dict(initialise(module, ["weight"], seed=0))["weight"], module.weight)


def test_meta_without_a_recipe_is_an_error() -> None:
    module = nn.Linear(3, 3, device="meta")
    with pytest.raises(UserError, match="build the model inside"):
        list(initialise(module, ["weight"], seed=0))


def test_seeds_depend_on_every_part() -> None:
    keys = [(0, "a"), (0, "b"), (1, "a"), (0, "a", 0), ("0", "a")]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    state = torch.get_rng_state()
    with seeded(3, "x"):
        first = torch.rand(3)
    with seeded(3, "x"):
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(state, torch.get_rng_state())
