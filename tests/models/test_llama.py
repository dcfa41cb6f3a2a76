"""What is special to the Llama family: capture with identical blocks, windows, precision."""

from typing import Any

import pytest
import torch

from openwafer.models.attention import attend, causal_mask
from openwafer.models.config import ModelConfig
from openwafer.models.llama import Llama
from openwafer.models.rope import Rope

SIZES: dict[str, Any] = {
    "family": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 40,
}
GEMMA: dict[str, Any] = {
    "sliding_window": 4,
    "sliding_window_pattern": 3,
    "rope_local_theta": 10.0,
    "gemma_norms": True,
    "qk_norm": True,
    "tie_word_embeddings": True,
}
IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("training", [True, False])
def test_export(device: str, training: bool, options: dict[str, Any]):
    with torch.device(device):
        module = Llama(ModelConfig(**SIZES, **options)).train(training)
    ids = IDS.to(device)
    program = torch.export.export(module, (ids, ids), strict=False)
    assert len(program.graph_signature.user_outputs) == 2
    if device == "cpu" and not training:
        captured = program.module(check_guards=False)(ids, ids)
        assert all(torch.equal(*pair) for pair in zip(module(ids, ids), captured, strict=True))


def block_graphs(module: Llama) -> list[list[str]]:
    """The operations of each layer in the captured graph, in order."""
    program = torch.export.export(module, (IDS.to("meta"), IDS.to("meta")), strict=False)
    graphs: list[list[str]] = [[] for _ in module.model.layers]
    for node in program.graph.nodes:
        path = " ".join(str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values())
        for index, graph in enumerate(graphs):
            if f"model.layers.{index}" in path.split():
                graph.append(str(node.target))
    return graphs


@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
def test_layers_of_a_kind_are_the_identical_graph(options: dict[str, Any]):
    config = ModelConfig(**SIZES, **options)
    with torch.device("meta"):
        graphs = block_graphs(Llama(config))
    assert len(graphs[0]) > 20
    for sliding in (True, False):
        kind = [graph for index, graph in enumerate(graphs) if config.is_sliding(index) == sliding]
        assert all(graph == kind[0] for graph in kind)
    shared = ("arange", "cos", "sin", "le.", "gt.")
    assert not [op for graph in graphs for op in graph if any(f"aten.{name}" in op for name in shared)]


@torch.no_grad()
def test_a_sliding_layer_does_not_see_beyond_its_window():
    """One layer, window 3: the last logits depend on the last three tokens and on nothing before."""
    module = Llama(ModelConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=3))
    changed = IDS.clone()
    changed[:, :9] = 7
    assert torch.equal(module(IDS)[:, -1], module(changed)[:, -1])
    changed[:, 9] = 7
    assert not torch.equal(module(IDS)[:, -1], module(changed)[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "cached", "window"), [(6, 0, None), (1, 5, None), (3, 3, None), (6, 0, 2), (1, 5, 2)]
)
def test_attention_equals_the_plain_formula(tokens: int, cached: int, window: int | None, dtype: torch.dtype):
    torch.manual_seed(0)
    total = tokens + cached
    q = torch.randn(2, 4, tokens, 8).to(dtype)
    k, v = torch.randn(2, 2, 2, total, 8).to(dtype)
    mask = causal_mask(tokens, cached, window, q.device)
    found = attend(q, k, v, mask, scale=0.3)

    scores = torch.einsum("bhtd,bhsd->bhts", q.float(), k.float().repeat_interleave(2, dim=1)) * 0.3
    for t in range(tokens):
        for s in range(total):
            if s > cached + t or (window is not None and s <= cached + t - window):
                scores[:, :, t, s] = -torch.inf
    expected = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v.float().repeat_interleave(2, dim=1))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.flatten(2), atol=tolerance, rtol=tolerance)


def test_full_causal_attention_needs_no_mask():
    device = torch.device("cpu")
    assert causal_mask(4096, 0, None, device) is None
    assert causal_mask(4096, 0, 4096, device) is None
    assert causal_mask(1, 4095, 4096, device) is None
    assert causal_mask(1, 4096, 4096, device) is not None


def test_casting_the_model_keeps_rotary_frequencies_exact():
    rope = Rope(8, 10000.0)
    exact = rope.inv_freq.clone()
    assert torch.equal(rope.to(torch.bfloat16).inv_freq, exact)
    assert rope.inv_freq.dtype == torch.float32
    cos, _ = rope(torch.arange(1000), torch.bfloat16)
    assert cos.dtype == torch.bfloat16


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    module = Llama(ModelConfig(**SIZES, dropout=0.5))
    assert not torch.equal(module(IDS), module(IDS))
    module.eval()
    assert torch.equal(module(IDS), module(IDS))
