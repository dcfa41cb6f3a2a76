"""Ranks that meet: they find each other over a store with leftovers, and mistakes are told before anything starts."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from openwafer.cli.main import main
from openwafer.errors import UserError
from openwafer.swarmx.config import SwarmConfig
from openwafer.swarmx.meeting import Meeting
from openwafer.swarmx.world import _verdict

HELLO = {"version": "1", "torch": "2", "params": "abc", "machine": "m", "threads": 1, "trouble": None}


def meet(store: Any, hellos: list[dict[str, Any]], decide: Any = lambda num_csx: {"csx": num_csx}) -> list[dict]:
    """All ranks as threads; gives what each was told."""
    told: list[Any] = [None] * len(hellos)

    def attend(rank: int) -> None:
        told[rank] = Meeting(store, rank, len(hellos)).attend(hellos[rank])

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(1, len(hellos))]
    for thread in threads:
        thread.start()
    lead = Meeting(store, 0, len(hellos))
    told[0] = lead.lead(hellos[0], lambda found: _verdict(found, SwarmConfig(), decide))
    for thread in threads:
        thread.join(30)
    return told


def hello(rank: int, **other: Any) -> dict[str, Any]:
    return {**HELLO, "host": f"host{rank}:1", **other}


def test_all_are_told_the_same_and_leftovers_do_no_harm() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    first = meet(store, [hello(rank) for rank in range(3)])
    assert first[0] == first[1] == first[2]
    assert first[0]["hosts"] == ["host0:1", "host1:1", "host2:1"]
    assert first[0]["decision"] == {"csx": 2}
    again = meet(store, [hello(rank) for rank in range(3)])
    assert again[0] == again[1] == again[2]
    assert again[0]["round"] != first[0]["round"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("params", "rank 2 on host2:1 has other params"),
        ("version", "rank 2 on host2:1 has another version"),
        ("trouble", "rank 2 on host2:1: 99"),
        ("torch", "rank 2 on host2:1 has another torch"),
        ("threads", "rank 2 on host2:1 has another number of threads"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_by_all(key: str, message: str) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    told = meet(store, [hello(0), hello(1), hello(2, **{key: "99"})])
    assert all(message in verdict["error"] for verdict in told)


def test_what_rank_0_finds_wrong_is_told_to_all() -> None:
    def decide(num_csx: int) -> dict[str, Any]:
        raise UserError(f"{num_csx} are too many")

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    assert all(verdict["error"] == "1 are too many" for verdict in meet(store, [hello(0), hello(1)], decide))


def as_rank(monkeypatch: pytest.MonkeyPatch, size: int, port: int) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_a_world_of_the_wrong_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(monkeypatch, 3, 1)
    arguments = ["train", "--params", "gpt_tiny", "--model_dir", str(tmp_path), "--micro_batch_size", "1"]
    assert main([*arguments, "--num_csx", "4", "--min_csx", "4"]) == 2
    error = capsys.readouterr().err
    assert "the world has 3 ranks, which leaves 2 workers beside num_memoryx 1; num_csx is 4" in error
    assert error.count("\n") == 1


def test_an_address_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        as_rank(monkeypatch, 3, taken.getsockname()[1])
        arguments = ["train", "--params", "gpt_tiny", "--model_dir", str(tmp_path), "--micro_batch_size", "1"]
        assert main([*arguments, "--num_csx", "2"]) == 2
    assert "is already in use: choose another" in capsys.readouterr().err
