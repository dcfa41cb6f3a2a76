"""Causal attention shared by the families, and the masks it needs.

Shapes: b batch, h query heads, k key/value heads, t new tokens, s all tokens so far, d head size.
"""

import torch
import torch.nn.functional as F


def causal_mask(num_tokens: int, num_cached: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Bool [t, s], true where a new token may look; None where `attend` knows the rule without a mask."""
    total = num_cached + num_tokens
    if (num_cached == 0 or num_tokens == 1) and (window is None or total <= window):
        return None
    query = torch.arange(num_cached, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """q [b, h, t, d] over k, v [b, k, s, d] gives [b, t, h · d].

    Without a mask: causal among t tokens, or one new token that sees everything (`causal_mask`).
    """
    single = q.shape[2] == 1
    grouped = q.shape[1] != k.shape[1]
    # PyTorch documents enable_gqa on CUDA for the flash kernel (half precision, no mask) and for the one that
    # materialises all scores. Where flash cannot run, repeat the heads, so other fused kernels still can.
    fused = mask is None and (single or q.dtype != torch.float32)
    if grouped and not fused:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and not single,
        scale=scale,
        enable_gqa=grouped and fused,
    )
    return out.transpose(1, 2).flatten(2)
