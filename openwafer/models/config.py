"""What a model is made of: one configuration for the GPT and the Llama families.

Three keys (`hidden_size`, `num_hidden_layers`, `num_heads`) are enough; the rest has the family's defaults,
which the properties below resolve. This module imports no torch.
"""

from dataclasses import dataclass, fields
from typing import Literal

from openwafer.config import option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context the model was first trained on."""

    kind: Literal["llama3", "linear"] = option("llama3", help="scaling rule")
    factor: float = option(help="how far the context is stretched", minimum=1)
    low_freq_factor: float = option(1.0, help="llama3: wavelengths above context/this are stretched fully")
    high_freq_factor: float = option(4.0, help="llama3: wavelengths below context/this are left alone")
    original_max_position_embeddings: int = option(8192, help="llama3: the original context", minimum=1)

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}: frequencies are blended between the two"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. `None` means the family's default, given by the property of similar name."""

    family: Literal["gpt", "llama"] = option("gpt", help="gpt: GPT-2/3; llama: Llama, Mistral, Qwen, Gemma 3")
    hidden_size: int = option(help="width of the residual stream", minimum=1)
    num_hidden_layers: int = option(help="number of blocks", minimum=1)
    num_heads: int = option(help="attention heads", minimum=1)
    num_kv_heads: int | None = option(None, help="key/value heads (default: num_heads)", minimum=1)
    head_dim: int | None = option(None, help="size of a head (default: hidden_size / num_heads)", minimum=1)
    intermediate_size: int | None = option(None, help="width of the feed-forward layer", minimum=1)
    vocab_size: int = option(50257, help="number of token ids", minimum=1)
    max_position_embeddings: int = option(2048, help="longest context", minimum=1)
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] | None = option(None, help="feed-forward nonlinearity")
    norm_eps: float = option(1e-5, help="epsilon of the norms", minimum=0)
    tie_word_embeddings: bool | None = option(None, help="share the embedding with the output head")
    dropout: float = option(0.0, help="dropout after embedding, attention and feed-forward", minimum=0, maximum=0.99)
    qkv_bias: bool = option(False, help="llama: biases on q, k and v (Qwen2)")
    qk_norm: bool = option(False, help="llama: RMSNorm on each q and k head (Qwen3, Gemma 3)")
    rope_theta: float = option(10000.0, help="llama: base of the rotary frequencies", minimum=1)
    rope_scaling: RopeScaling | None = option(None, help="llama: stretched rotary frequencies")
    rope_local_theta: float | None = option(None, help="llama: rotary base of sliding layers (Gemma 3)")
    sliding_window: int | None = option(None, help="llama: attend to at most this many tokens", minimum=1)
    sliding_window_pattern: int | None = option(
        None, help="llama: every N-th layer sees everything; default: all slide", minimum=1
    )
    gemma_norms: bool = option(False, help="llama: Gemma 3's (1 + w) norms before and after, scaled embedding")
    attention_scale: float | None = option(None, help="scale of q·k (default: head_dim ** -0.5)", minimum=0)

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise UserError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}: "
                "change one of them, or give head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}: "
                "each key/value head serves the same number of query heads"
            )
        if self.family == "llama" and self.head_size % 2:
            raise UserError(f"head_dim {self.head_size} is odd: rotary positions turn pairs of dims")
        if self.family == "gpt":
            self._refuse_llama_options()

    def _refuse_llama_options(self) -> None:
        """An option that GPT would silently ignore is a mistake."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.metadata["help"].startswith("llama:") and value != field.default:
                raise UserError(f"{field.name} {value!r} needs family: llama; a gpt has no such option")
        if self.kv_heads != self.num_heads:
            raise UserError(
                f"num_kv_heads {self.kv_heads} needs family: llama; a gpt has as many as num_heads, {self.num_heads}"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """4 × hidden for GPT; for Llama 8/3 × hidden, rounded up to a multiple of 256."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.family == "gpt":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 256) * 256

    @property
    def nonlinearity(self) -> str:
        return self.activation or ("gelu_tanh" if self.family == "gpt" else "silu")

    @property
    def tied(self) -> bool:
        return self.tie_word_embeddings if self.tie_word_embeddings is not None else self.family == "gpt"

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer attends through the sliding window only."""
        if self.sliding_window is None:
            return False
        return self.sliding_window_pattern is None or (layer + 1) % self.sliding_window_pattern != 0
