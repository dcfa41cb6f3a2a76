"""Where rows stand in made-up batches of `decode_gpu.py`."""

import numpy as np
import torch

from openwafer.serve.gpu.places import Places, most_numbers, packed, unpacked
from openwafer.serve.gpu.runner import BLOCK_SIZE
from openwafer.serve.runner import Batch


def decode_places(num_users: int, length: int, device: torch.device) -> tuple[Places, int]:
    """Every user's last token of `length`, blocks in any order; and the number of blocks."""
    width = -(-length // BLOCK_SIZE)
    num_blocks = num_users * width
    rows = np.arange(num_users, dtype=np.int32)
    batch = Batch(
        tokens=np.zeros(num_users, np.int32),
        positions=np.full(num_users, length - 1, np.int32),
        sequences=rows,
        tables=np.random.default_rng(0).permutation(num_blocks).reshape(num_users, width).astype(np.int32),
        logit_rows=rows,
    )
    staged = np.zeros(most_numbers(num_users, num_blocks), np.int32)
    packed(batch, BLOCK_SIZE, num_users, 0, rows, staged)
    return unpacked(torch.from_numpy(staged).to(device), num_users, num_users), num_blocks
