"""AdamW on a flat array of weights as wire and remainder: the fast C pass and the definition it must equal."""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openwafer.kernels.compiled import library

_POINTERS = [ctypes.c_void_p] * 5
_FLOATS = [ctypes.c_float] * 8


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one update, rounded to fp32 as both versions use them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    divisor: float = 1.0  # gradients are divided by this
    factor: float = 1.0  # and multiplied by this (clipping)

    @property
    def keep(self) -> float:
        return _fp32(1.0 - self.lr * self.weight_decay)

    @property
    def rate(self) -> float:
        return _fp32(self.lr / (1.0 - self.beta1**self.step))

    @property
    def inverse_root(self) -> float:
        return _fp32(1.0 / math.sqrt(1.0 - self.beta2**self.step))


def adamw(
    wire: Tensor,
    remainder: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    step: AdamWStep,
    *,
    threads: int | None = None,
) -> bool:
    """One update in place of flat CPU arrays; `gradient` is bf16 or fp32. False: a new weight is not finite."""
    built = library("adamw")
    if built is None:
        return _by_parts(wire, remainder, m, v, gradient, step)
    function = built.adamw_bf16_gradient if gradient.dtype is torch.bfloat16 else built.adamw_fp32_gradient
    function.argtypes = [*_POINTERS, ctypes.c_int64, *_FLOATS, ctypes.c_int]
    arrays = (wire, remainder, m, v, gradient)
    assert all(t.is_contiguous() and t.device.type == "cpu" and t.numel() == wire.numel() for t in arrays)
    numbers = (step.divisor, step.factor, step.keep, step.beta1, step.beta2, step.inverse_root, step.eps, step.rate)
    pointers = (t.data_ptr() for t in arrays)
    return function(*pointers, wire.numel(), *numbers, threads or torch.get_num_threads()) == 0


def _by_parts(wire: Tensor, remainder: Tensor, m: Tensor, v: Tensor, gradient: Tensor, step: AdamWStep) -> bool:
    """Without a compiler: the reference in pieces that keep its temporaries small."""
    size = 1 << 20
    arrays = (wire, remainder, m, v, gradient)
    pieces = list(zip(*(t.split(size) for t in arrays), strict=True))
    return all([adamw_reference(a, b, c, d, e, step) for a, b, c, d, e in pieces])


def adamw_reference(wire: Tensor, remainder: Tensor, m: Tensor, v: Tensor, gradient: Tensor, step: AdamWStep) -> bool:
    """The definition, in torch operations rounded one by one; runs on any device with the same bits."""
    high = wire.view(torch.int16).to(torch.int32) << 16
    master = (high + remainder.to(torch.int32)).view(torch.float32)
    g = gradient.float() / step.divisor * step.factor
    one_minus_beta1, one_minus_beta2 = _one_minus(step.beta1), _one_minus(step.beta2)
    kept = master * step.keep
    m.copy_(m * _fp32(step.beta1) + g * one_minus_beta1)
    v.copy_(v * _fp32(step.beta2) + g * g * one_minus_beta2)
    denominator = v.sqrt() * step.inverse_root + _fp32(step.eps)
    new = kept - m / denominator * step.rate
    bits = new.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = (bits + 0x8000) >> 16
    remainder.copy_((bits - (rounded << 16)).to(torch.int16))
    wire.view(torch.int16).copy_(torch.where(rounded >= 1 << 15, rounded - (1 << 16), rounded).to(torch.int16))
    return bool(torch.isfinite(new).all())


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _one_minus(beta: float) -> float:
    """1 - beta with beta rounded to fp32 first, as C computes it."""
    return float(np.float32(1.0) - np.float32(beta))
