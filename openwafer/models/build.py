"""From a configuration to its module."""

from torch import nn

from openwafer.models.config import ModelConfig
from openwafer.models.gpt import GPT
from openwafer.models.llama import Llama


def build(config: ModelConfig) -> nn.Module:
    """The module of `config`, initialised; under `torch.device("meta")` nothing is allocated."""
    return GPT(config) if config.family == "gpt" else Llama(config)
