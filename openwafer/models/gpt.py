"""GPT-2/3: learned positions, LayerNorm, GELU, biases everywhere, head tied to the embedding.

Parameters are named as in Hugging Face's GPT-2, so that weights need no renaming. Shapes: b batch, t tokens.
"""

import torch
from torch import nn

from openwafer.errors import UserError
from openwafer.models.attention import attend, causal_mask
from openwafer.models.cache import KVCache, LayerCache
from openwafer.models.config import ModelConfig
from openwafer.models.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    drop,
    loss,
    output_head,
    residual_std,
)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_size = config.head_size
        self.scale = config.attention_scale
        self.dropout = config.dropout
        width = config.num_heads * config.head_size
        self.c_attn = Linear(config.hidden_size, 3 * width, bias=True)
        self.c_proj = Linear(width, config.hidden_size, bias=True, std=residual_std(config.num_hidden_layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: LayerCache | None) -> torch.Tensor:
        heads = self.c_attn(x).unflatten(-1, (3, -1, self.head_size))  # [b, t, 3, heads, head_size]
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.c_proj(attend(q, k, v, mask, self.scale, self.dropout if self.training else 0.0))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.feed_forward_size
        self.c_fc = Linear(hidden, inner, bias=True)
        self.c_proj = Linear(inner, hidden, bias=True, std=residual_std(config.num_hidden_layers))
        self.activation = ACTIVATIONS[config.nonlinearity]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: LayerCache | None) -> torch.Tensor:
        x = x + drop(self.attn(self.ln_1(x), mask, cache), self.dropout, self.training)
        return x + drop(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Body(nn.Module):
    """Everything under Hugging Face's `transformer.` prefix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = config.dropout

    def forward(self, input_ids: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        num_tokens, num_cached = input_ids.shape[1], cache.length if cache else 0
        if num_cached + num_tokens > self.wpe.num_embeddings:
            raise UserError(
                f"{num_cached + num_tokens} tokens exceed the {self.wpe.num_embeddings} positions of this "
                "model: shorten the text or raise max_position_embeddings"
            )
        positions = torch.arange(num_cached, num_cached + num_tokens, device=input_ids.device)
        mask = causal_mask(num_tokens, num_cached, None, input_ids.device)
        x = drop(self.wte(input_ids) + self.wpe(positions), self.dropout, self.training)
        for index, block in enumerate(self.h):
            x = block(x, mask, cache.layers[index] if cache else None)
        return self.ln_f(x)


class GPT(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.transformer = Body(config)
        self.lm_head = output_head(self.transformer.wte, config.tied)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 [b, t] gives logits [b, t, vocab], or (loss_sum, count) with labels.

        labels [b, t] are the tokens that follow each input; -100 is ignored.
        """
        if cache is not None:
            cache.check_room(input_ids.shape[1])
        logits = self.lm_head(self.transformer(input_ids, cache))
        if cache is not None:
            cache.length += input_ids.shape[1]
        return logits if labels is None else loss(logits, labels)
