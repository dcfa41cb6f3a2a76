"""All ranks of a run under torchrun: who is who, whether they fit together, and the groups they speak over.

Ranks 0 .. M-1 are MemoryX, the others CSX. Before anything starts every rank says what it is going to run; rank 0
compares and decides for all.
"""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from openwafer.errors import UserError
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.meeting import Meeting, compare, open_store
from openwafer.swarmx.torchrun import world_size
from openwafer.swarmx.transfer import NEVER

# What must be the same everywhere, and how a difference is called.
_SAME = {"version": "another version", "torch": "another torch", "params": "other params"}
_SAME |= {"machine": "another machine", "threads": "another number of threads"}


@dataclass(frozen=True, eq=False)
class World:
    """The ranks of a run, seen from one of them."""

    rank: int
    num_memoryx: int
    num_csx: int
    hosts: tuple[str, ...]  # of each rank
    control: Any  # process group for messages
    bulk: Any  # process group for weights and gradients
    verdict: dict[str, Any]  # what rank 0 said to all at the start

    @property
    def is_store(self) -> bool:
        return self.rank < self.num_memoryx

    @property
    def csx_ranks(self) -> range:
        return range(self.num_memoryx, self.num_memoryx + self.num_csx)

    def name(self, rank: int) -> str:
        role = f"memoryx {rank}" if rank < self.num_memoryx else f"csx {rank - self.num_memoryx}"
        return f"rank {rank} ({role} on {self.hosts[rank]})"


def join(
    config: SwarmConfig,
    num_csx: int,
    params: Mapping[str, Any],
    version: str,
    decide: Callable[[int], dict[str, Any]],
    trouble: str | None = None,
) -> World:
    """Meet the other ranks. `decide` is called on rank 0 with the number of workers; all ranks get what it gives.

    `trouble` is why this rank cannot take part: all are told, and none starts.
    """
    rank, size = int(os.environ["RANK"]), world_size()
    found_csx = size - config.num_memoryx
    _check_size(size, config, num_csx)
    store = open_store(rank, size)
    hello = {"version": version, "torch": torch.__version__, "params": _digest(params)}
    hello |= {"machine": platform.machine(), "host": f"{socket.gethostname()}:{os.getpid()}"}
    hello["threads"] = torch.get_num_threads() if rank >= config.num_memoryx else None
    hello["trouble"] = trouble
    meeting = Meeting(store, rank, size)
    if rank == 0:
        verdict = meeting.lead(hello, lambda hellos: _verdict(hellos, config, decide))
    else:
        verdict = meeting.attend(hello)
    if "error" in verdict:
        raise UserError(verdict["error"] if rank == 0 else f"rank 0 refused to start: {verdict['error']}")
    store = PrefixStore(f"openwafer/{verdict['round']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NEVER)
    everyone = list(range(size))
    return World(
        rank=rank,
        num_memoryx=config.num_memoryx,
        num_csx=found_csx,
        hosts=tuple(verdict["hosts"]),
        control=dist.new_group(everyone, timeout=NEVER, backend="gloo"),
        bulk=dist.new_group(everyone, timeout=NEVER, backend="gloo"),
        verdict=verdict["decision"],
    )


def _verdict(
    hellos: list[dict[str, Any]], config: SwarmConfig, decide: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    try:
        compare(hellos, _SAME)
        decision = decide(len(hellos) - config.num_memoryx)
    except UserError as error:
        return {"error": str(error)}
    return {"decision": decision, "hosts": [hello["host"] for hello in hellos]}


def _check_size(size: int, config: SwarmConfig, num_csx: int) -> None:
    found = size - config.num_memoryx
    least = min(config.min_csx, num_csx)
    if not least <= found <= num_csx:
        raise UserError(
            f"the world has {size} ranks, which leaves {found} workers beside num_memoryx {config.num_memoryx}; "
            f"num_csx is {num_csx} and min_csx {config.min_csx}: start {config.num_memoryx + num_csx} ranks, or give "
            f"other numbers"
        )


def _digest(params: Mapping[str, Any]) -> str:
    """Of what must be equal everywhere; where data and tiers lie may differ by host."""
    kept = {section: values for section, values in params.items() if section not in ("data", "memoryx")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
