"""AdamW on weights kept as wire and remainder: the fast C pass and the definition it must equal."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openwafer.kernels.compiled import library

_PIECE = 1 << 20  # elements that the reference takes at a time, to keep its temporaries small


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int  # from 1
    divisor: float = 1.0  # gradients are divided by this
    factor: float = 1.0  # and multiplied by this (clipping)

    @property
    def rate(self) -> float:
        return _fp32(self.lr / (1.0 - self.beta1**self.step))

    @property
    def inverse_root(self) -> float:
        return _fp32(1.0 / math.sqrt(1.0 - self.beta2**self.step))

    def keep(self, weight_decay: float) -> float:
        return _fp32(1.0 - self.lr * weight_decay)


class Halves(NamedTuple):
    """One weight with its state and its gradient, all flat and of one length."""

    wire: Tensor  # bf16
    remainder: Tensor  # int16
    m: Tensor
    v: Tensor
    gradient: Tensor  # bf16 or fp32
    weight_decay: float


_STATE = ("wire", "remainder", "m", "v")


class _Weight(ctypes.Structure):
    _fields_ = (
        *((f"{place}_{name}", ctypes.c_void_p) for place in ("from", "to") for name in _STATE),
        ("gradient", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("first_piece", ctypes.c_int64),
        ("keep", ctypes.c_float),
    )


def adamw(
    weights: Sequence[Halves], step: AdamWStep, *, to: Sequence[Halves] | None = None, threads: int | None = None
) -> bool:
    """Updates weights on the CPU, in one call: whoever feeds a GPU keeps Python to itself meanwhile.

    In place, or into the state of `to`, whose gradients are not looked at. All gradients have one type. False: a new
    weight is not finite.
    """
    built = library("adamw")
    if built is None:
        return _adamw_without_library(weights, step, to)
    assert len({weight.gradient.dtype for weight in weights}) <= 1, "gradients of several types"
    array = (_Weight * len(weights))()
    for slot, weight, target in zip(array, weights, to or weights, strict=True):
        tensors = (*weight[:4], *target[:4], weight.gradient)
        assert all(t.is_contiguous() and t.device.type == "cpu" and t.numel() == weight.wire.numel() for t in tensors)
        for name, old, new in zip(_STATE, weight[:4], target[:4], strict=True):
            setattr(slot, f"from_{name}", old.data_ptr())
            setattr(slot, f"to_{name}", new.data_ptr())
        slot.gradient, slot.n, slot.keep = (
            weight.gradient.data_ptr(),
            weight.wire.numel(),
            step.keep(weight.weight_decay),
        )
    numbers = (step.divisor, step.factor, step.beta1, step.beta2, step.inverse_root, step.eps, step.rate)
    is_bf16 = int(bool(weights) and weights[0].gradient.dtype is torch.bfloat16)
    arguments = map(ctypes.c_float, numbers)
    return built.adamw(array, len(weights), *arguments, is_bf16, threads or default_threads()) == 0


def default_threads() -> int:
    """All cores but one where there are many: whoever feeds a GPU meanwhile must not wait for a core."""
    threads = torch.get_num_threads()
    return threads - 1 if threads > 4 else threads


def _adamw_without_library(weights: Sequence[Halves], step: AdamWStep, to: Sequence[Halves] | None) -> bool:
    if to is not None:
        for weight, target in zip(weights, to, strict=True):
            for old, new in zip(weight[:4], target[:4], strict=True):
                new.copy_(old)
        weights = [Halves(*t[:4], w.gradient, w.weight_decay) for w, t in zip(weights, to, strict=True)]
    return all([adamw_reference(piece, step) for weight in weights for piece in _pieces(weight)])


def _pieces(weight: Halves) -> list[Halves]:
    tensors = (weight.wire, weight.remainder, weight.m, weight.v, weight.gradient)
    pieces = zip(*(t.split(_PIECE) for t in tensors), strict=True)
    return [Halves(wire, remainder, m, v, gradient, weight.weight_decay) for wire, remainder, m, v, gradient in pieces]


def adamw_reference(weight: Halves, step: AdamWStep) -> bool:
    """The definition, in torch operations rounded one by one; runs on any device with the same bits."""
    wire, remainder, m, v, gradient, weight_decay = weight
    high = wire.view(torch.int16).to(torch.int32) << 16
    master = (high + remainder.to(torch.int32)).view(torch.float32)
    g = gradient.float() / step.divisor * step.factor
    kept = master * step.keep(weight_decay)
    m.copy_(m * _fp32(step.beta1) + g * _one_minus(step.beta1))
    v.copy_(v * _fp32(step.beta2) + g * g * _one_minus(step.beta2))
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
