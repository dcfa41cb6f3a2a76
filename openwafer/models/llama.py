"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated feed-forward.

One module for Llama 2/3, SmolLM2, Mistral (sliding window), Qwen2 (q/k/v biases), Qwen3 (q/k norms) and
Gemma 3 (norms around both sublayers, local and global layers). Parameters are named as in Hugging Face's.
Shapes: b batch, t tokens.
"""

import torch
from torch import nn

from openwafer.models.attention import attend, causal_mask
from openwafer.models.cache import KVCache, LayerCache
from openwafer.models.config import ModelConfig
from openwafer.models.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    RMSNorm,
    drop,
    loss,
    output_head,
    residual_std,
)
from openwafer.models.rope import Rope, rotate

# What a layer needs to know of the positions: cos, sin, and the mask (None: plainly causal).
Positions = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        self.head_size = size
        self.scale = config.attention_scale
        self.dropout = config.dropout
        self.q_proj = Linear(hidden, config.num_heads * size, config.qkv_bias)
        self.k_proj = Linear(hidden, config.kv_heads * size, config.qkv_bias)
        self.v_proj = Linear(hidden, config.kv_heads * size, config.qkv_bias)
        self.o_proj = Linear(config.num_heads * size, hidden, std=residual_std(config.num_hidden_layers))
        self.q_norm = RMSNorm(size, config.norm_eps, config.gemma_norms) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.norm_eps, config.gemma_norms) if config.qk_norm else None

    def forward(self, x: torch.Tensor, positions: Positions, cache: LayerCache | None) -> torch.Tensor:
        cos, sin, mask = positions
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(attend(q, k, v, mask, self.scale, self.dropout if self.training else 0.0))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.feed_forward_size
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden, std=residual_std(config.num_hidden_layers))
        self.activation = ACTIVATIONS[config.nonlinearity]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout = config.dropout
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    def forward(self, x: torch.Tensor, positions: Positions, cache: LayerCache | None) -> torch.Tensor:
        y = self.self_attn(self.input_layernorm(x), positions, cache)
        x = x + drop(y, self.dropout, self.training)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + drop(y, self.dropout, self.training)


class GemmaBlock(Block):
    """Gemma 3: what leaves a sublayer is normed too, before it joins the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.pre_feedforward_layernorm = _norm(config)
        self.post_feedforward_layernorm = _norm(config)

    def forward(self, x: torch.Tensor, positions: Positions, cache: LayerCache | None) -> torch.Tensor:
        y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, cache))
        x = x + drop(y, self.dropout, self.training)
        y = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + drop(y, self.dropout, self.training)


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, config.gemma_norms)


class Body(nn.Module):
    """Everything under Hugging Face's `model.` prefix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        kind = GemmaBlock if config.gemma_norms else Block
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(kind(config) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.rotary_emb = Rope(config.head_size, config.rope_theta, config.rope_scaling)
        local = config.rope_local_theta
        self.rotary_emb_local = None if local is None else Rope(config.head_size, local)

    def forward(self, input_ids: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        if self.config.gemma_norms:
            # A tensor of x's dtype, because the original rounds the scale to it too.
            x = x * torch.full((), self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        x = drop(x, self.config.dropout, self.training)
        # Worked out once for all layers, so that all layers of a kind run the identical graph.
        kinds = {self.config.is_sliding(index) for index in range(len(self.layers))}
        positions = {sliding: self._positions(x, sliding, cache) for sliding in sorted(kinds)}
        for index, layer in enumerate(self.layers):
            layer_cache = cache.layers[index] if cache else None
            x = layer(x, positions[self.config.is_sliding(index)], layer_cache)
        return self.norm(x)

    def _positions(self, x: torch.Tensor, sliding: bool, cache: KVCache | None) -> Positions:
        num_tokens, num_cached = x.shape[1], cache.length if cache else 0
        rope = self.rotary_emb_local if sliding and self.rotary_emb_local is not None else self.rotary_emb
        cos, sin = rope(torch.arange(num_cached, num_cached + num_tokens, device=x.device), x.dtype)
        window = self.config.sliding_window if sliding else None
        return cos, sin, causal_mask(num_tokens, num_cached, window, x.device)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = output_head(self.model.embed_tokens, config.tied)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 [b, t] gives logits [b, t, vocab], or (loss_sum, count) with labels.

        labels [b, t] are the tokens that follow each input; -100 is ignored.
        """
        if cache is not None:
            cache.check_room(input_ids.shape[1])
        logits = self.lm_head(self.model(input_ids, cache))
        if cache is not None:
            cache.length += input_ids.shape[1]
        return logits if labels is None else loss(logits, labels)
