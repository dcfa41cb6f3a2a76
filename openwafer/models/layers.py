"""Layers that the families share; each initialises itself once, in place, as GPT-2 does."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

INIT_STD = 0.02

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def residual_std(num_hidden_layers: int) -> float:
    """Std of a projection into the residual stream, so that the sum of all 2 · layers of them stays O(1)."""
    return INIT_STD / (2 * num_hidden_layers) ** 0.5


class Linear(nn.Linear):
    """nn.Linear whose one initialisation is ours; nn.Linear's own would be drawn first and thrown away."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        std: float = INIT_STD,
        device: str | None = None,
    ):
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias, device=device)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim; with `plus_one` (Gemma) the stored weight is the gain minus 1.

    Llama's runs in PyTorch's fused kernel. In bf16 it rounds once, after the gain, where the original
    rounds before it too; in fp32 the two agree.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.plus_one = plus_one
        nn.init.constant_(self.weight, 0.0 if plus_one else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plus_one:
            return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def drop(x: torch.Tensor, dropout: float, training: bool) -> torch.Tensor:
    """Dropout that leaves no trace in a captured graph when there is none."""
    return F.dropout(x, dropout) if training and dropout else x


def output_head(embedding: nn.Embedding, tied: bool) -> Linear:
    """The projection from hidden states to logits; a tied one has no weight of its own."""
    head = Linear(embedding.embedding_dim, embedding.num_embeddings, device="meta" if tied else None)
    if tied:
        head.weight = embedding.weight
    return head


# Cross entropy in fp32 is taken of this many tokens at a time: for a vocabulary of 32,000 and 16,384 tokens its
# intermediate values would otherwise take 6 GB, more than all else that a layer needs.
_LOSS_TOKENS = 4096


def loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 sum of cross entropy over the labels that are not -100, and their count (int64)."""
    pieces = zip(logits.flatten(0, -2).split(_LOSS_TOKENS), labels.flatten().split(_LOSS_TOKENS), strict=True)
    sums = [F.cross_entropy(piece.float(), of, ignore_index=-100, reduction="sum") for piece, of in pieces]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return total, (labels != -100).sum()
