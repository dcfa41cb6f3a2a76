"""Randomness by key: every draw is a function of what it is for, never of what was drawn before."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed for a key such as (seed, step, micro-batch, Unit) or (seed, weight name)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def set_seed(seed: int) -> None:
    """Start the default generators from `seed`.

    `torch.manual_seed` does the same, but formats a stack trace on every call while no GPU is in use, which was
    30 % of a step of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def seeded(*parts: int | str, device: torch.device | None = None) -> Iterator[None]:
    """Inside, the default generator of the CPU (and of `device`) starts from the key; afterwards it is as before."""
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        set_seed(seed_of(*parts))
        yield
