"""Workers with devices under torchrun: real ranks, and devices of host memory whose copies come late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import assert_same, tensors, write_params

from openwafer.cli.main import main
from openwafer.errors import UserError
from openwafer.train.rank_device import Place, RankDevice

ROOT = Path(__file__).parents[2]
STEPS = 12

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_params(tmp_path_factory.mktemp("ranks"), num_steps=STEPS, batch_size=10, hidden_size=80)


def torchrun(num_ranks: int, program: list[str], params: Path, model_dir: Path, *flags: str) -> tuple[int, str]:
    """Exit status and what all ranks said; on this host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [*program, "train", "--params", str(params), "--model_dir", str(model_dir), "--device", "cuda", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr


LATE = [str(ROOT / "tests" / "late_rank.py")]
FP32 = ("--precision", "fp32")


def test_two_stores_and_two_workers_with_devices_give_the_bits_of_one_without(params: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert main(["train", "--params", str(params), "--model_dir", str(alone), "--eval_every", "6"]) == 0
    flags = ("--num_memoryx", "2", "--num_csx", "2", "--eval_every", "6", *FP32)
    status, said = torchrun(4, LATE, params, tmp_path / "ranks", *flags)
    assert status == 0, said
    assert_same(tensors(tmp_path / "ranks", STEPS), tensors(alone, STEPS))


def test_a_step_that_does_not_fit_is_refused_with_what_it_needs(params: Path, tmp_path: Path) -> None:
    status, said = torchrun(2, LATE, params, tmp_path, "--device_memory", "5MB", *FP32)
    assert status != 0
    assert "of device memory, 4.768 MiB are allowed" in said
    assert "Traceback (most recent call last)" not in said.split("openwafer: ")[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_without_a_gpu_says_so_and_a_store_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, name in ((1, "RANK"), (1, "LOCAL_RANK"), (2, "LOCAL_WORLD_SIZE")):
        monkeypatch.setenv(name, str(rank))
    with pytest.raises(UserError, match="PyTorch sees no GPU here"):
        RankDevice.of_this_rank(1, None)
    assert RankDevice.of_this_rank(2, None) is None


def test_places() -> None:
    """Two stores and four workers on two hosts of three ranks; GPUs are counted on each host from 0."""
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "3"} for rank in range(6)]
    places = [Place.of_this_rank(2, rank) for rank in ranks]
    assert places == [None, None, Place(0, 1), Place(0, 3), Place(1, 3), Place(2, 3)]
    three = [Place(index, 3) for index in range(3)]
    assert [place.gpu(2) for place in three] == [0, 1, 0]
    assert [place.num_sharing(2) for place in three] == [2, 1, 2]
    with pytest.raises(UserError, match="LOCAL_RANK is not set"):
        Place.of_this_rank(1, {"RANK": "0"})
