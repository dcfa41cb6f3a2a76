"""What the fabric and the workers did in a step. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CsxReport:
    """One worker in the last step."""

    name: str
    micro_batches_per_s: float
    waited_s: Mapping[str, float]  # by what it waited for, since its last report


@dataclass(frozen=True)
class SwarmReport:
    """All workers in the last step."""

    seconds: float
    broadcast_bytes: int  # weights to all workers together
    reduced_bytes: int  # gradients from all workers together
    csx: tuple[CsxReport, ...]


def worker_line(csx: CsxReport, seconds: float, doing: str) -> str:
    """A worker for people: `csx 1 (process 12)  3.1 micro-batches/s  waited 8 % for weights; computes h.3`."""
    shares = [(share / seconds, what) for what, share in csx.waited_s.items() if share > 0.01 * seconds]
    waited = ", ".join(f"{100 * share:.0f} % for {what}" for share, what in sorted(shares, reverse=True)[:2])
    return f"{csx.name}  {csx.micro_batches_per_s:.3g} micro-batches/s  waited {waited or 'for nothing'}; {doing}"
