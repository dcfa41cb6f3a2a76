"""The ranks of a server on several hosts: before anything starts each says what it has, and rank 0 whether they fit.

Rank i has stage i + 1. Rank 0 also has the engine and the HTTP server.
"""

import dataclasses
import hashlib
import json
import os
import platform
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openwafer.errors import UserError
from openwafer.models.load import StoredModel, open_model
from openwafer.serve.budget import available_bytes
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.host import Host, num_cores
from openwafer.swarmx.meeting import Meeting, compare, open_store
from openwafer.swarmx.torchrun import Launched, end_with_launcher, world_size

# What must be the same everywhere, and how a difference is called.
_SAME = {"version": "another version", "torch": "another torch", "machine": "another machine"}
_SAME |= {"flags": "other flags", "model": "another model"}
_END_BYTES = 1 << 16  # of a file, that are compared


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """All ranks, seen from one of them."""

    rank: int
    names: tuple[str, ...]
    hosts: tuple[Host, ...]
    meeting: str  # its name, which is new at every start
    store: Any  # that of rank 0 may be the one that all others use

    def link(self, name: str) -> str:
        """The name of a link of this start."""
        return f"openwafer/{self.meeting}/{name}"


def meet(model: str, config: EngineConfig, version: str) -> Members:
    """Wait for all ranks. UserError, on all of them, if one has other flags, another model or none."""
    launched, size = Launched.read(os.environ, "which ranks share a host is unknown"), world_size()
    end_with_launcher()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler does not run while we wait
    hello = {"version": version, **_hello(model, config, launched)}
    store = open_store(launched.rank, size)
    meeting = Meeting(store, launched.rank, size)
    verdict = meeting.lead(hello, judge) if launched.rank == 0 else meeting.attend(hello)
    signal.signal(signal.SIGINT, before)
    if "error" in verdict:
        raise UserError(verdict["error"] if launched.rank == 0 else f"rank 0 refused to start: {verdict['error']}")
    hosts = tuple(Host(**host | {"gpus": tuple(map(tuple, host["gpus"]))}) for host in verdict["hosts"])
    return Members(
        rank=launched.rank, names=tuple(verdict["names"]), hosts=hosts, meeting=verdict["round"], store=store
    )


def judge(hellos: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 tells all: who they are, or why they do not fit."""
    try:
        compare(hellos, _SAME)
    except UserError as error:
        return {"error": str(error)}
    names = [f"stage {rank + 1} of {len(hellos)} (rank {rank} on {hello['host']})" for rank, hello in enumerate(hellos)]
    by_first: dict[int, list[dict[str, Any]]] = {}
    for hello in hellos:
        by_first.setdefault(hello["first_of_host"], []).append(hello)
    return {"names": names, "hosts": [dataclasses.asdict(_host(here)) for here in by_first.values()]}


def _host(ranks: list[dict[str, Any]]) -> Host:
    """Of what its ranks say: each has looked at the GPU that it is going to use."""
    count = ranks[0]["num_gpus"]
    return Host(
        name=ranks[0]["host"].rpartition(":")[0],
        num_stages=len(ranks),
        num_cores=ranks[0]["num_cores"],
        free_dram=ranks[0]["free_dram"],
        gpus=tuple(tuple(rank["gpu"]) for rank in ranks[:count]),
    )


def _hello(model: str, config: EngineConfig, launched: Launched) -> dict[str, Any]:
    """Of this rank. What keeps it from taking part is its `trouble`."""
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name != "flash"}
    hello = {
        "host": f"{socket.gethostname()}:{os.getpid()}",
        "first_of_host": launched.first_of_host,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "flags": _digest(json.dumps(flags, sort_keys=True).encode()),
        "model": None,
        "num_cores": num_cores(),
        "free_dram": available_bytes(),
        "num_gpus": 0,
        "gpu": None,
        "trouble": None,
    }
    try:
        hello["model"] = fingerprint(open_model(model))
        if config.device == "cuda":
            from openwafer.serve.gpu.opening import gpu_of

            hello["num_gpus"], hello["gpu"] = gpu_of(launched.local_rank)
    except UserError as error:
        hello["trouble"] = str(error)
    return hello


def fingerprint(stored: StoredModel) -> str:
    """The size of a model's files, and a digest of its shape, the kinds of its weights and both ends of each file.

    Reading all of it would take as long as loading it.
    """
    said = [str(stored.config).encode(), json.dumps(sorted(stored.kinds().items())).encode()]
    num_bytes = 0
    for path in _weight_files(stored.path):
        size = path.stat().st_size
        num_bytes += size
        with path.open("rb") as file:
            said.append(file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            said.append(file.read(_END_BYTES))
    return f"{num_bytes} bytes, {_digest(b''.join(said))}"


def _weight_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(each for each in path.iterdir() if each.suffix in (".safetensors", ".gguf"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
