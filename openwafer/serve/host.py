"""What the stages of one host have to share, as the host itself has found it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host that runs `num_stages` stages, which follow each other."""

    num_stages: int
    num_cores: int
    free_dram: int | None = None  # bytes that can still be had; None: enough
    gpus: tuple[tuple[int, int], ...] = ()  # (free, all) bytes of each
    name: str = "this host"


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def by_host(hosts: Sequence[Host], each: Sequence[T]) -> list[Sequence[T]]:
    """What belongs to every stage, cut into what belongs to those of each host."""
    ends = [sum(host.num_stages for host in hosts[:count]) for count in range(len(hosts) + 1)]
    assert ends[-1] == len(each)
    return [each[start:stop] for start, stop in pairwise(ends)]


def with_less(hosts: Sequence[Host], num_bytes: int) -> list[Host]:
    """The first has so much less memory."""
    free = hosts[0].free_dram
    return [replace(hosts[0], free_dram=None if free is None else max(0, free - num_bytes)), *hosts[1:]]
