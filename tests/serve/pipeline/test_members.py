"""Ranks that meet: what their hosts have, and who does not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openwafer.serve.host import Host
from openwafer.serve.pipeline.members import fingerprint, judge
from tests.serve.conftest import CONFIGS, stored, tiny_module


def hello(rank: int, first: int, **other: Any) -> dict[str, Any]:
    found = {"host": f"host{first}:{100 + rank}", "first_of_host": first, "version": "1", "torch": "2", "machine": "m"}
    found |= {"flags": "f", "model": "9 bytes, abc", "trouble": None}
    found |= {"num_cores": 4 + first, "free_dram": 1000 + rank, "num_gpus": 2, "gpu": [70 + rank, 80]}
    return found | other


def test_hosts_are_what_their_ranks_say() -> None:
    verdict = judge([hello(0, 0), hello(1, 1), hello(2, 1), hello(3, 1)])
    assert verdict["names"][2] == "stage 3 of 4 (rank 2 on host1:102)"
    first, second = (Host(**host) for host in verdict["hosts"])
    assert first == Host(name="host0", num_stages=1, num_cores=4, free_dram=1000, gpus=((70, 80),))
    assert second == Host(name="host1", num_stages=3, num_cores=5, free_dram=1001, gpus=((71, 80), (72, 80)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "8 bytes, abd"}, "another model (8 bytes, abd) than rank 0 on host0:100 (9 bytes, abc)"),
        ({"flags": "g"}, "other flags"),
        ({"torch": "3"}, "another torch"),
        ({"trouble": "no file or folder gone", "model": None}, "rank 1 on host1:101: no file or folder gone"),
    ],
)
def test_who_does_not_fit_is_named(other: dict[str, Any], message: str) -> None:
    verdict = judge([hello(0, 0), hello(1, 1, **other)])
    assert "rank 1 on host1:101" in verdict["error"]
    assert message in verdict["error"]


def test_a_fingerprint_is_of_the_shape_the_size_and_the_ends(tmp_path: Path) -> None:
    def of(name: str, weights: torch.Tensor, model: str = "llama") -> str:
        (tmp_path / name).mkdir()
        save_file({"weight": weights}, tmp_path / name / "model.safetensors")
        return fingerprint(dataclasses.replace(stored(tiny_module(CONFIGS[model])), path=tmp_path / name))

    weights = torch.zeros(100_000)
    same = of("one", weights)
    assert same == of("copy", weights)
    assert same.startswith("400")
    weights[-1] = 1  # another run of training
    others = [of("trained", weights), of("longer", torch.zeros(100_001)), of("other", torch.zeros(100_000), "qwen2")]
    assert len({same, *others}) == 4
