"""The dense key/value cache of generation: what the tokens so far left behind in each layer."""

import torch

from openwafer.errors import UserError
from openwafer.models.config import ModelConfig


class LayerCache:
    """Keys and values of one layer, [batch, kv_heads, max_tokens, head_size]."""

    def __init__(
        self,
        owner: "KVCache",
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self._owner = owner
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens after the old ones; returns all keys and values so far."""
        start = self._owner.length
        stop = start + keys.shape[2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVCache:
    """One LayerCache per layer and the number of tokens they hold; all rows of the batch are equally long.

    A model's forward appends its tokens to every layer and then raises `length`; setting `length` lower
    forgets the last tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (batch, config.kv_heads, max_tokens, config.head_size)
        self.layers = [LayerCache(self, shape, dtype, device) for _ in range(config.num_hidden_layers)]
        self.max_tokens = max_tokens
        self.length = 0

    def check_room(self, num_tokens: int) -> None:
        if self.length + num_tokens > self.max_tokens:
            raise UserError(
                f"{num_tokens} more tokens do not fit: the cache holds {self.length} of at most "
                f"{self.max_tokens}; shorten the text or make the cache larger"
            )
