"""Ranks that torchrun started find each other, and see whether they fit together."""

import datetime
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.rendezvous import rendezvous

from openwafer.errors import UserError

_MEETING = datetime.timedelta(minutes=10)  # a busy host may take long to start processes


def open_store(rank: int, size: int) -> Any:
    """The store that torchrun, or rank 0, keeps for all ranks."""
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
        try:
            return self._attend(uuid.uuid4().hex, hello)
        except RuntimeError as error:  # the store's, of which the first line says enough
            raise UserError(f"rank 0 was not heard: {str(error).splitlines()[0]}; was it started?") from None

    def _attend(self, mine: str, hello: dict[str, Any]) -> dict[str, Any]:
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


def compare(hellos: list[dict[str, Any]], same: Mapping[str, str]) -> None:
    """UserError if a rank has a trouble, or anything in `same` (how a difference is called) that another has not."""
    for rank, other in enumerate(hellos):
        if other["trouble"] is not None:
            raise UserError(f"rank {rank} on {other['host']}: {other['trouble']}")
        for key, what in same.items():
            mine = next((hello[key] for hello in hellos if hello[key] is not None), None)
            if other[key] is not None and other[key] != mine:
                raise UserError(
                    f"rank {rank} on {other['host']} has {what} ({other[key]}) than rank 0 on {hellos[0]['host']} "
                    f"({mine}): start all ranks with the same command and the same installation"
                )
