"""Sums of squares over blocks of a gradient: the definition, and fast passes on the CPU and a GPU with the same bits.

The squares of a block are added in one fixed order: the second half to the first until a row of 2048 is left, then
neighbours, until one number is left. Each level adds numbers that do not depend on one another, so that any machine
does it with vectors, and the order is one that suits a GPU as well.
"""

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import functional

from openwafer.kernels.compiled import library

# Squares are summed in fp32 within blocks of this many elements of one weight: enough that the list of sums is short.
BLOCK_ELEMENTS = 16384
ROW = 2048
_FAST_TYPES = (torch.float32, torch.bfloat16)


def square_sums(gradient: Tensor) -> Tensor:
    """Sum of squares of each block of a weight's gradient, in order: fp32 [blocks], where the gradient is."""
    flat = gradient.reshape(-1)
    if flat.dtype in _FAST_TYPES and flat.numel() > 0:
        if flat.device.type == "cpu" and (built := library("squares")) is not None:
            n, sums = flat.numel(), torch.empty(-(-flat.numel() // BLOCK_ELEMENTS))
            where, to = ctypes.c_void_p(flat.data_ptr()), ctypes.c_void_p(sums.data_ptr())
            built.square_sums(where, ctypes.c_int64(n), to, int(flat.dtype is torch.bfloat16), torch.get_num_threads())
            return sums
        if flat.is_cuda and _has_triton():
            from openwafer.kernels.squares_gpu import square_sums_gpu

            return square_sums_gpu(flat)
    return square_sums_reference(flat)


def square_sums_reference(flat: Tensor) -> Tensor:
    """The definition, in torch operations rounded one by one; runs on any device with the same bits."""
    missing = -flat.numel() % BLOCK_ELEMENTS
    totals = functional.pad(flat.float(), (0, missing)).view(-1, BLOCK_ELEMENTS).square()
    while totals.shape[1] > ROW:
        first, second = totals.chunk(2, dim=1)
        totals = first + second
    while totals.shape[1] > 1:
        totals = totals[:, ::2] + totals[:, 1::2]
    return totals[:, 0]


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True
