"""The presets in params/: their sizes, how fast they build on meta, and how a real one is initialised."""

import time
from pathlib import Path

import pytest
import torch

from openwafer.config import load_yaml, parse
from openwafer.models.build import build
from openwafer.models.config import ModelConfig

PARAMS = Path(__file__).parents[2] / "params"
PUBLISHED = {
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "smollm2_135m": 134_515_008,
}
GPT_PRESETS = {
    "gpt_tiny": (192, 4, 2048, 128),
    "gpt3_1b": (2048, 24, 50257, 2048),
    "gpt3_175b": (12288, 96, 50257, 2048),
    "msft_1t": (25600, 128, 50257, 2048),
    "brain_100t": (98304, 864, 50257, 2048),
}


def preset(name: str) -> ModelConfig:
    return parse(ModelConfig, load_yaml(PARAMS / f"{name}.yaml")["model"], "model")


def gpt_size(hidden: int, layers: int, vocab: int, context: int) -> int:
    """12 h² + 13 h per block (4 + 8 matrices, 9 biases' worth, 2 norms), the embeddings and the last norm."""
    return layers * (12 * hidden**2 + 13 * hidden) + (vocab + context + 2) * hidden


def test_every_preset_is_counted_here():
    assert {file.stem for file in PARAMS.glob("*.yaml")} >= PUBLISHED.keys() | GPT_PRESETS.keys()


@pytest.mark.parametrize("name", [*PUBLISHED, *GPT_PRESETS])
def test_parameter_counts(name: str):
    with torch.device("meta"):
        module = build(preset(name))
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == (PUBLISHED[name] if name in PUBLISHED else gpt_size(*GPT_PRESETS[name]))
    assert f"{count:,}" in (PARAMS / f"{name}.yaml").read_text().splitlines()[0]
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize(
    ("name", "about"), [("gpt3_1b", 1.3e9), ("gpt3_175b", 174.6e9), ("msft_1t", 1e12), ("brain_100t", 1e14)]
)
def test_gpt_presets_are_the_size_they_are_named_after(name: str, about: float):
    assert gpt_size(*GPT_PRESETS[name]) == pytest.approx(about, rel=0.015)


def test_the_tiny_preset_is_tiny():
    config = preset("gpt_tiny")
    embeddings = (config.vocab_size + config.max_position_embeddings) * config.hidden_size
    assert 1e6 < gpt_size(*GPT_PRESETS["gpt_tiny"]) - embeddings < 2e6


def test_seventy_billion_parameters_build_quickly_on_meta():
    """0.5 s on two shared cores; the limit leaves room for a busy machine."""
    config = preset("llama3_70b")
    start = time.process_time()
    with torch.device("meta"):
        build(config)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_initialisation(family: str):
    options = {"family": family, "hidden_size": 64, "num_hidden_layers": 8, "num_heads": 4, "vocab_size": 500}
    torch.manual_seed(0)
    module = build(parse(ModelConfig, options)).requires_grad_(False)
    residual = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / 4 if name.endswith(residual) else 0.02
            assert float(parameter.std()) == pytest.approx(std, rel=0.06), name
            assert abs(parameter.mean()) < std / 10, name
        else:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


def test_the_same_seed_gives_the_same_weights_and_each_is_drawn_once():
    """The only random draws are one normal per matrix, in the order of the parameters."""
    config = ModelConfig(hidden_size=16, num_hidden_layers=2, num_heads=2, vocab_size=30)
    torch.manual_seed(3)
    module = build(config)
    torch.manual_seed(3)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            std = 0.01 if name.endswith("c_proj.weight") else 0.02
            assert torch.equal(parameter, torch.empty_like(parameter).normal_(std=std)), name
