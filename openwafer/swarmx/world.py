"""All ranks of a run under torchrun: who is who, whether they fit together, and the groups they speak over.

Ranks 0 .. M-1 are MemoryX, the others CSX. Before anything starts every rank says what it is going to run; rank 0
compares and decides for all.
"""

import datetime
import hashlib
import json
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from openwafer.errors import UserError
from openwafer.swarmx.config import SwarmConfig

_MEETING = datetime.timedelta(minutes=10)  # a busy host may take long to start processes
_NEVER = datetime.timedelta(days=30)  # transfers wait for computing ranks; heartbeats find those that are lost


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


def is_distributed() -> bool:
    """Whether torchrun, or someone who sets what it sets, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


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
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found_csx = size - config.num_memoryx
    _check_size(size, config, num_csx)
    store = _rendezvous(rank, size)
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
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_NEVER)
    everyone = list(range(size))
    return World(
        rank=rank,
        num_memoryx=config.num_memoryx,
        num_csx=found_csx,
        hosts=tuple(verdict["hosts"]),
        control=dist.new_group(everyone, timeout=_NEVER, backend="gloo"),
        bulk=dist.new_group(everyone, timeout=_NEVER, backend="gloo"),
        verdict=verdict["decision"],
    )


def _rendezvous(rank: int, size: int) -> Any:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=datetime.timedelta(seconds=300)))
    except (RuntimeError, OSError) as error:  # DistNetworkError is a RuntimeError
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise UserError(
                f"the address {address}:{port} is already in use: choose another --rdzv-endpoint or MASTER_PORT"
            ) from None
        raise UserError(f"cannot meet the other ranks at {address}:{port}: {str(error).splitlines()[0]}") from None
    return store


class Meeting:
    """All ranks of one start find each other over a store that still holds what earlier starts left.

    A rank writes what it is under a new random name; rank 0 answers to that name and takes only those for present
    that say they heard it.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def attend(self, hello: dict[str, Any]) -> dict[str, Any]:
        mine = uuid.uuid4().hex
        self._store.set(f"join/{self._rank}", json.dumps({"name": mine, **hello}))
        self._store.wait([f"heard/{mine}"], _MEETING)
        number = self._store.get(f"heard/{mine}").decode()
        self._store.set(f"present/{number}/{self._rank}", mine)
        self._store.wait([f"verdict/{number}"], _MEETING)
        return json.loads(self._store.get(f"verdict/{number}"))

    def lead(self, hello: dict[str, Any], judge: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
        number = uuid.uuid4().hex
        hellos = {0: hello}
        deadline = time.monotonic() + _MEETING.total_seconds()
        while len(hellos) < self._size:
            for rank in set(range(self._size)) - hellos.keys():
                self._invite(number, rank, hellos)
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._size)) - hellos.keys())
                raise UserError(f"rank {missing[0]} of {self._size} did not come: were all hosts started?")
            time.sleep(0.02)
        verdict = {"round": number, **judge([hellos[rank] for rank in range(self._size)])}
        self._store.set(f"verdict/{number}", json.dumps(verdict))
        return verdict

    def _invite(self, number: str, rank: int, hellos: dict[int, dict[str, Any]]) -> None:
        if not self._store.check([f"join/{rank}"]):
            return
        found = json.loads(self._store.get(f"join/{rank}"))
        self._store.set(f"heard/{found['name']}", number)
        key = f"present/{number}/{rank}"
        if self._store.check([key]) and self._store.get(key).decode() == found["name"]:
            hellos[rank] = found


def _verdict(
    hellos: list[dict[str, Any]], config: SwarmConfig, decide: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    try:
        _compare(hellos)
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


def _compare(hellos: list[dict[str, Any]]) -> None:
    """All ranks run the same program on the same params."""
    for rank, other in enumerate(hellos):
        if other["trouble"] is not None:
            raise UserError(f"rank {rank} on {other['host']}: {other['trouble']}")
        for key in ("version", "torch", "params", "machine", "threads"):
            mine = next((hello[key] for hello in hellos if hello[key] is not None), None)
            if other[key] is not None and other[key] != mine:
                what = {"params": "other params", "threads": "another number of threads"}.get(key, f"another {key}")
                raise UserError(
                    f"rank {rank} on {other['host']} has {what} ({other[key]}) than rank 0 on {hellos[0]['host']} "
                    f"({mine}): start all ranks with the same command and the same installation"
                )


def _digest(params: Mapping[str, Any]) -> str:
    """Of what must be equal everywhere; where data and tiers lie may differ by host."""
    kept = {section: values for section, values in params.items() if section not in ("data", "memoryx")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
