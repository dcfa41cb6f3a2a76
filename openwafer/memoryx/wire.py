"""The exact fp32 master of a weight as two 16-bit halves: what is sent, and what is not.

wire = bits rounded half up to the upper 16 (a bf16 number), remainder = bits - (wire << 16), signed. Together they
are the fp32 number to the bit, in 4 bytes, and the wire is ready to send. (Rounding to nearest even would need a
17-bit remainder at ties.) Non-finite numbers are refused, not encoded.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from openwafer.errors import UserError

WIRE = "wire"  # the fields of a store that hold the two halves
REMAINDER = "remainder"


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(wire bf16, remainder int16) of an fp32 tensor of any shape."""
    if not torch.isfinite(master).all():
        raise UserError("a weight is not finite (NaN or infinity): it cannot be stored")
    bits = master.contiguous().view(torch.int32)
    # Finite numbers are far enough from the ends of int32 that the carry of the rounding never wraps around.
    wire = ((bits + 0x8000) >> 16).to(torch.int16)
    remainder = (bits - (wire.to(torch.int32) << 16)).to(torch.int16)
    return wire.view(torch.bfloat16), remainder


def merge(wire: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master."""
    master = torch.empty_like(wire, dtype=torch.float32, memory_format=torch.contiguous_format)
    merge_into(master, (wire, remainder))
    return master


def merge_into(master: Tensor, halves: Iterable[Tensor]) -> None:
    """Write the fp32 master of (wire, remainder) to a contiguous tensor; no other memory is taken. The second half
    is asked for when the first is done with."""
    bits = master.view(torch.int32)
    for half in halves:
        if half.dtype == torch.bfloat16:
            bits.copy_(half.contiguous().view(torch.int16)).bitwise_left_shift_(16)
        else:
            bits += half
