"""Each optimizer against torch's own or a formula in fp64, whatever the threads; groups and configuration."""

from typing import Any

import pytest
import torch

from openwafer.config import parse
from openwafer.errors import UserError
from openwafer.memoryx.config import SGD, Adafactor, Adam, AdamW, GroupConfig, Lion, OptimizerConfig
from openwafer.memoryx.optimizer import make_optimizer
from openwafer.memoryx.optimizers.adafactor import folded_sum

SHAPES = [(40, 24), (7,), (3, 5, 6), (1, 9), ()]
STEPS = 20


def problem(shape: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator) * (0.1 + step % 3) for step in range(STEPS)]
    return torch.randn(shape, generator=generator), gradients


def trained(config: OptimizerConfig, weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    optimizer = make_optimizer(config)
    weight = weight.clone()
    shapes = optimizer.state_shapes(tuple(weight.shape))
    state = {name: torch.zeros(shape, dtype=optimizer.state_dtype) for name, shape in shapes.items()}
    for step, gradient in enumerate(gradients, start=1):
        optimizer.update("w", weight, gradient.clone(), state, lr=config.lr, step=step)
    return weight


OURS_AND_TORCH: dict[str, tuple[OptimizerConfig, Any]] = {
    "sgd": (SGD(lr=0.1, momentum=0.0, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "momentum": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    "adamw": (
        AdamW(lr=0.01, beta2=0.98),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1),
    ),
    "adafactor": (
        Adafactor(lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OURS_AND_TORCH)
def test_it_is_what_torch_does(name: str, shape: tuple[int, ...]) -> None:
    config, make = OURS_AND_TORCH[name]
    # Given for a group, weight decay holds for vectors too, as in torch.
    group = GroupConfig(match="w", weight_decay=config.weight_decay)
    config = OptimizerConfig(**{**vars(config), "groups": (group,)})
    weight, gradients = problem(shape)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = make([theirs])
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    ours = trained(config, weight, gradients)
    assert (ours - weight).abs().max() > 0.01
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_lion_is_its_formula(shape: tuple[int, ...]) -> None:
    weight, gradients = problem(shape)
    w, m = weight.double(), torch.zeros(shape, dtype=torch.float64)
    decay = 0.3 if len(shape) >= 2 else 0.0
    for gradient in gradients:
        g = gradient.double()
        w = w * (1 - 1e-2 * decay) - 1e-2 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(trained(Lion(lr=1e-2), weight, gradients).double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "lion", "adafactor"])
def test_threads_change_nothing(kind: Any) -> None:
    weight, gradients = problem((371, 403))  # more than torch gives to one thread, and no round numbers
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(trained(OptimizerConfig(kind=kind), weight, gradients[:4]))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64])
def test_folded_sum(size: int) -> None:
    values = torch.randn(size, 5, size)
    for dim in (0, 2, -1):
        expected = values.double().sum(dim=dim, keepdim=True)
        torch.testing.assert_close(folded_sum(values.clone(), dim).double(), expected, rtol=1e-5, atol=1e-5)


def test_bf16_state_takes_half_the_bytes_and_nearly_the_same_way() -> None:
    weight, gradients = problem((40, 24))
    exact = trained(AdamW(lr=0.01), weight, gradients)
    half = trained(AdamW(lr=0.01, state_dtype="bf16"), weight, gradients)
    assert make_optimizer(AdamW(state_dtype="bf16")).state_dtype == torch.bfloat16
    assert not torch.equal(exact, half)
    torch.testing.assert_close(half, exact, rtol=0, atol=0.01)
    assert (half - exact).abs().mean() < 0.05 * (exact - weight).abs().mean()


def test_the_first_group_that_matches_wins() -> None:
    groups = (
        GroupConfig(match="*.special.weight", lr_scale=0.5),
        GroupConfig(match=["*.weight", "b"], weight_decay=0.7),  # pyright: ignore[reportArgumentType]
    )
    optimizer = make_optimizer(AdamW(weight_decay=0.1, groups=groups))
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert (optimizer.lr_scale("a.special.weight"), optimizer.decay("a.special.weight", matrix)) == (0.5, 0.1)
    assert optimizer.decay("a.special.weight", vector) == 0.0
    assert (optimizer.lr_scale("a.weight"), optimizer.decay("a.weight", vector)) == (1.0, 0.7)
    assert (optimizer.lr_scale("other"), optimizer.decay("other", matrix)) == (1.0, 0.1)


def test_defaults_by_kind_are_filled_in() -> None:
    assert (AdamW().beta2, AdamW().weight_decay, AdamW().momentum) == (0.95, 0.1, None)
    assert (SGD().lr, SGD().momentum, SGD().beta1) == (0.05, 0.9, None)
    config = parse(OptimizerConfig, {"kind": "lion", "loss_scale": 2048, "groups": [{"match": ["a", "b"]}]})
    assert config.groups[0].patterns == ("a", "b")
    assert config.loss_scale == 2048.0
    assert parse(OptimizerConfig, vars(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "sgd", "beta1": 0.5}, "beta1 0.5 does nothing for sgd; it has: lr, weight_decay, momentum, nesterov"),
        ({"momentum": 0.5}, "momentum 0.5 does nothing for adamw"),
        ({"kind": "adamax"}, "kind must be one of sgd, adam, adamw, lion, adafactor, got 'adamax'"),
        ({"kind": "sgd", "nesterov": True, "momentum": 0}, "nesterov needs a momentum above 0"),
        ({"max_grad_norm": 0}, "max_grad_norm must be above 0"),
        ({"max_grad_value": -1}, "max_grad_value must be above 0"),
        ({"max_grad_value": 1, "max_grad_norm": 1}, "give one of them"),
        ({"loss_scale": 1000}, "loss_scale must be a power of two such as 1024, or dynamic, got 1000"),
        ({"loss_scale": 0}, "loss_scale must be a power of two"),
        ({"loss_scale": -2}, "loss_scale must be a power of two"),
        ({"loss_scale": "dynamical"}, "loss_scale must be one of dynamic, got 'dynamical'; or .* a number"),
        ({"nan": "ignore"}, "nan must be one of stop, skip"),
        ({"kind": "adam", "state_dtype": "bf16"}, "beta2 0.999 is too slow for state_dtype bf16"),
        ({"kind": "adafactor", "state_dtype": "bf16"}, "not for adafactor"),
        ({"groups": [{"match": ""}]}, "needs a pattern"),
        ({"groups": [{"lr_scale": 2}]}, r"groups\[0\].match is missing"),
        ({"groups": [{"match": "*", "lr": 2}]}, r"unknown key 'groups\[0\].lr'"),
        ({"groups": [{"match": "*", "frozen": True, "lr_scale": 2}]}, "lr_scale and weight_decay would do nothing"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(OptimizerConfig, values)
