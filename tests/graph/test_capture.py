"""Units run in order give the original module's outputs and gradients, bit for bit, for all kinds of models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree

from openwafer.errors import UserError
from openwafer.graph import Graph, capture
from openwafer.graph.run import backward, bind_inputs, forward, result_of
from openwafer.graph.unit import SEGMENT_ELEMENTS, Value
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

IDS = torch.arange(32).reshape(2, 16) * 7 % 97


class Residual(nn.Module):
    """A ResNet basic block: convolutions, BatchNorm, in-place activations, a projection."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != channels_in:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.fc(x), target)


class PlainMLP(nn.Module):
    """No container at all; two inputs, dropout between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.relu(self.first(x)), 0.25, self.training)
        x = nn.functional.dropout(torch.relu(self.second(x)), 0.25, self.training)
        return nn.functional.mse_loss(self.third(x), target)


class TwoStreams(nn.Module):
    """Blocks with several inputs and outputs, nested and keyword ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        a, b, scale = pair["a"], pair["b"], 2.0
        for layer in self.layers:
            (a, b), scale = layer((a, b), bias=pair["a"], scale=scale)
        return (a * b).sum()


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor, scale: float) -> Any:
        a, b = pair
        return (torch.tanh(self.linear(b)) + bias, a * scale), scale


OURS = {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "vocab_size": 97, "max_position_embeddings": 16}


def our_gpt() -> nn.Module:
    return build(ModelConfig(**OURS, dropout=0.1))


def our_llama() -> nn.Module:
    """Grouped-query attention, and sliding layers beside full ones: two kinds of blocks."""
    return build(
        ModelConfig(**OURS, family="llama", num_kv_heads=2, sliding_window=8, sliding_window_pattern=3, qk_norm=True)
    )


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=97, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=97,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=97
    )
    return transformers.BertForMaskedLM(config)


def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=97,
    )
    return transformers.AlbertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


TEXT = {"input_ids": IDS, "labels": IDS.clone()}
MASKED = {**TEXT, "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
# `transformers` builds an explicit causal mask when it is exported and uses SDPA's flag otherwise, which rounds
# the gradient of k differently. With padding it builds the mask in both cases, so the bits can be compared.
PADDED = {**TEXT, "attention_mask": torch.tensor([[1] * 16, [1] * 13 + [0] * 3]), "use_cache": False}
IMAGES = torch.linspace(-1, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16)
CLASSES = torch.tensor([0, 3, 1, 4])
PAIR = {"a": torch.linspace(-1, 1, 24).reshape(4, 6), "b": torch.linspace(1, -2, 24).reshape(4, 6)}

# name, module, kwargs, Units, distinct functions
CASES: list[tuple[str, Callable[[], nn.Module], dict[str, Any], int, int]] = [
    ("our_gpt", our_gpt, TEXT, 5, 3),
    ("our_llama", our_llama, TEXT, 5, 4),
    ("gpt2", gpt2, PADDED, 5, 3),
    ("llama", llama, PADDED, 5, 3),
    ("bert", bert, MASKED, 5, 3),
    ("albert", albert, MASKED, 6, 3),
    ("vit", vit, {"pixel_values": IMAGES, "labels": CLASSES}, 5, 3),
    ("resnet", ResNet, {"x": IMAGES, "target": CLASSES}, 7, 5),
    ("mlp", PlainMLP, {"x": PAIR["a"].repeat(1, 2), "target": PAIR["b"][:, :4]}, 4, 4),
    ("streams", TwoStreams, {"pair": PAIR}, 4, 3),
]


def loss_of(result: Any) -> torch.Tensor:
    """A scalar, our (loss_sum, count), or a `transformers` output."""
    if isinstance(result, torch.Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result["loss"]


def run_units(graph: Graph, module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, dict, dict[str, torch.Tensor]]:
    """Result, buffer updates, and weight gradients summed over uses in reverse Unit order."""
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    state = torch.get_rng_state()
    values, updates = forward(graph, weights, buffers, bind_inputs(graph, (), kwargs))
    result = result_of(graph, values)
    scalars = [leaf.name for leaf in graph.outputs if isinstance(leaf, Value) and values[leaf.name].dim() == 0]
    (head,) = (name for name in scalars if values[name].is_floating_point())
    if any(unit.function.is_random for unit in graph.units):
        torch.set_rng_state(state)
        return result, updates, {}
    uses = backward(graph, weights, buffers, values, {head: torch.ones(())})
    total: dict[str, torch.Tensor] = {}
    for use in reversed(uses):
        for name, gradient in use.items():
            total[name] = total[name] + gradient if name in total else gradient
    return result, updates, total


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_units_equal_the_module(case: tuple, training: bool) -> None:
    name, make, kwargs, num_units, num_functions = case
    torch.manual_seed(0)
    module = make().train(training)
    graph = capture(module, (), kwargs)
    assert len(graph.units) == num_units
    assert len(graph.functions) == num_functions
    before = {n: b.clone() for n, b in module.named_buffers()}
    torch.manual_seed(1)
    result, updates, gradients = run_units(graph, module, kwargs)
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers()), "Units must not change buffers"
    torch.manual_seed(1)
    expected = module(**kwargs)
    for ours, theirs in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(ours, theirs)
    for buffer, value in updates.items():
        assert torch.equal(value, module.get_buffer(buffer))
    assert bool(updates) == (name == "resnet" and training)
    if gradients:
        loss_of(expected).backward()
        uses = {n: sum(n in unit.weights for unit in graph.units) for n in graph.weights}
        for parameter_name, parameter in module.named_parameters():
            if parameter.grad is None:
                assert parameter_name not in gradients
            elif uses[parameter_name] == 1:
                assert torch.equal(gradients[parameter_name], parameter.grad), parameter_name
            else:
                torch.testing.assert_close(gradients[parameter_name], parameter.grad)
    else:
        assert training


def test_dropout_gradients_replay_the_forward() -> None:
    """With the random state set before each Unit, recomputing a Unit drops the same elements."""
    torch.manual_seed(0)
    module = PlainMLP().train()
    x, target = PAIR["a"].repeat(1, 2), PAIR["b"][:, :4]
    graph = capture(module, (x, target))
    weights = dict(module.named_parameters())

    def seed(unit: Any) -> None:
        torch.manual_seed(100 + unit.index)

    def loss_at(shift: float) -> torch.Tensor:
        moved = {n: p.detach() + shift * direction[n] for n, p in weights.items()}
        values, _ = forward(graph, moved, {}, bind_inputs(graph, (x, target)), seed)
        return result_of(graph, values)

    values, _ = forward(graph, weights, {}, bind_inputs(graph, (x, target)), seed)
    heads = {leaf.name: torch.ones(()) for leaf in graph.outputs if isinstance(leaf, Value)}
    uses = backward(graph, weights, {}, values, heads, seed)
    gradients = {name: g for use in uses for name, g in use.items()}
    direction = {n: torch.randn_like(p) for n, p in weights.items()}
    slope = sum(((gradients[n] * direction[n]).sum() for n in weights), torch.zeros(()))
    measured = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    torch.testing.assert_close(measured, slope, rtol=2e-2, atol=1e-3)


def test_layout_is_padded_and_owned_once() -> None:
    graph = capture(gpt2(), (), {**TEXT, "use_cache": False})
    tied = graph.weights["transformer.wte.weight"]
    assert tied.owner == 0
    assert sum("transformer.wte.weight" in unit.weights for unit in graph.units) == 2
    for unit in graph.units:
        end = 0
        for weight in graph.owned(unit):
            assert weight.offset % SEGMENT_ELEMENTS == 0
            assert end <= weight.offset < end + SEGMENT_ELEMENTS
            end = weight.offset + weight.spec.num_elements
        assert end <= graph.flat_elements(unit)
    assert graph.num_parameters == sum(p.numel() for p in gpt2().parameters())


def test_flops_count_attention_and_matmuls() -> None:
    graph = capture(llama().eval(), (), {**TEXT, "use_cache": False})
    block = graph.units[1].function.cost
    tokens, hidden, kv, wide = 32, 32, 16, 48
    linear = 2 * tokens * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide)
    attention = 2 * 2 * 2 * 16 * 16 * hidden  # q·k and p·v for two sequences of 16
    assert block.forward_flops == linear + attention
    assert block.backward_flops >= 2 * block.forward_flops
    assert block.saved_bytes > 0


def test_capture_leaves_the_module_alone() -> None:
    module = llama()
    forwards = [layer.forward for layer in module.model.layers]
    before = {n: p.clone() for n, p in module.named_parameters()}
    capture(module, (), {**TEXT, "use_cache": False})
    assert [layer.forward for layer in module.model.layers] == forwards
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in module.modules())
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_dtype_captures_another_precision() -> None:
    module = PlainMLP().eval()
    x, target = PAIR["a"].repeat(1, 2), PAIR["b"][:, :4]
    graph = capture(module, (x, target), dtype=torch.bfloat16)
    weights = {n: p.bfloat16() for n, p in module.named_parameters()}
    values, _ = forward(graph, weights, {}, bind_inputs(graph, (x.bfloat16(), target.bfloat16())))
    expected = module.bfloat16()(x.bfloat16(), target.bfloat16())
    assert torch.equal(result_of(graph, values), expected)


def test_wrong_inputs_are_named() -> None:
    module = PlainMLP()
    graph = capture(module, (torch.zeros(4, 12), torch.zeros(4, 4)))
    with pytest.raises(UserError, match=r"input 'x' was captured as torch.float32 \[4, 12\]"):
        bind_inputs(graph, (torch.zeros(3, 12), torch.zeros(4, 4)))
    with pytest.raises(UserError, match="captured with 2 input tensors, got 1"):
        bind_inputs(graph, (torch.zeros(4, 12),))


class Doubling(nn.Module):
    """Changes its own input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x)


def test_blocks_that_change_their_input_in_place() -> None:
    module = nn.Sequential(nn.Linear(6, 6), Doubling(), Doubling(), nn.ReLU(inplace=True))
    graph = capture(module, (PAIR["a"],))
    values, _ = forward(graph, dict(module.named_parameters()), {}, bind_inputs(graph, (PAIR["a"],)))
    kept = {name: value.clone() for name, value in values.items()}
    assert torch.equal(result_of(graph, values), module(PAIR["a"]))
    heads = {leaf.name: torch.ones(4, 6) for leaf in graph.outputs if isinstance(leaf, Value)}
    uses = backward(graph, dict(module.named_parameters()), {}, values, heads)
    assert all(torch.equal(values[name], kept[name]) for name in kept), "recomputation must not change activations"
    module(PAIR["a"]).sum().backward()
    for name, gradient in [pair for use in uses for pair in use.items()]:
        assert torch.equal(gradient, module.get_parameter(name).grad)
