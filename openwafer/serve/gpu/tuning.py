"""Sizes that the fast kernels work in. They change the speed and the order of sums, not what is computed."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program of a kernel takes at once."""

    num_outputs: int  # gated layers take half: each output reads two rows of the weight
    num_inputs: int  # 4-bit weights of one row and packed weights of several come in groups instead, one at a time
    num_warps: int
    num_stages: int  # tiles under way at once; 1: the compiler's order


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Chosen for a GPU with about 130 multiprocessors; `bench/decode_gpu.py --parts tune` tries others."""

    gemv: Tile = field(default_factory=lambda: Tile(num_outputs=32, num_inputs=256, num_warps=4, num_stages=4))
    skinny: Tile = field(default_factory=lambda: Tile(num_outputs=32, num_inputs=128, num_warps=4, num_stages=4))
    skinny_rows: int = 16  # more rows go to the library's matrix products
    packed_gemv: Tile = field(default_factory=lambda: Tile(num_outputs=32, num_inputs=256, num_warps=4, num_stages=4))
    byte_gemv: Tile = field(default_factory=lambda: Tile(num_outputs=64, num_inputs=256, num_warps=4, num_stages=3))
    packed_skinny: Tile = field(
        default_factory=lambda: Tile(num_outputs=128, num_inputs=256, num_warps=4, num_stages=3)
    )
    byte_skinny: Tile = field(default_factory=lambda: Tile(num_outputs=128, num_inputs=128, num_warps=8, num_stages=3))
    packed_tile_rows: int = 64  # of a batch that a program takes at most
    packed_rows: int = 256  # as recorded graphs have; with more, packed weights are unpacked for the library's products
    scratch_bytes: int = 256 << 20  # at most, for weights that were unpacked so: one matrix or a part of it at a time
    num_multiprocessors: int = 132  # 4-bit products of one row that have fewer programs have twice the warps
    num_programs: int = 250  # that a kernel should have at least: two for most multiprocessors
    library_adds: bool = True  # the library's products add to fp32 themselves, where they can
    overlaps: bool = True  # kernels start before the last one ends, where the GPU can do that
    decode_tokens: int = 32  # keys that decoding attention takes at once
    prompt_rows: int = 64
    prompt_tokens: int = 64
    library_attention_rows: int = 1024  # a whole prompt of at least this length goes to the library's attention
