"""`openwafer train` on flash: killed twenty times, its files damaged, checkpoints failing; the bits stay the same."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openwafer.checkpoint import Checkpoint, latest
from openwafer.cli.main import main
from openwafer.data.prepare import PrepareConfig, prepare

STEPS = 80
KILLS = 20
Forks = Any  # of conftest.py


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flash")
    rng = random.Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(["wafer", "stream", "weight", "layer", "of", "the"]) for _ in range(5000)))
    prepare([text], folder / "tokens", PrepareConfig(vocab_size=280, val_fraction=0.1))
    file = folder / "params.yaml"
    file.write_text(
        f"""
model: {{hidden_size: 32, num_hidden_layers: 2, num_heads: 4, vocab_size: 280, max_position_embeddings: 8,
         dropout: 0.1}}
data: {{path: {folder / "tokens"}}}
train: {{num_steps: {STEPS}, batch_size: 2, micro_batch_size: 1, checkpoint_every: 2, log_every: 1}}
optimizer: {{lr: 0.01, max_grad_norm: 0.5}}
"""
    )
    return file


@pytest.fixture(scope="module")
def whole(params: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Forks) -> Checkpoint:
    """What a run ends with that nobody disturbed and that has all in DRAM."""
    model_dir = tmp_path_factory.mktemp("whole")
    code, said = zygote.run("train", "--params", params, "--model_dir", model_dir)
    assert code == 0, said
    return last_checkpoint(model_dir)


def last_checkpoint(model_dir: Path) -> Checkpoint:
    folder = latest(model_dir)
    assert folder is not None
    stored = Checkpoint.open(folder)
    assert stored.step == STEPS
    return stored


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert sorted(a.names()) == sorted(b.names())
    for name in a.names():
        assert a.read(name).equal(b.read(name)), name


def is_writing(model_dir: Path) -> bool:
    return any(".new." in path.name for path in (model_dir / "checkpoints").glob(".step_*"))


def num_lines(model_dir: Path) -> int:
    log = model_dir / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for(condition: Callable[[], bool], began: float) -> None:
    while time.monotonic() - began < 60 and not condition():
        time.sleep(0.001)


def whole_step(model_dir: Path) -> int:
    """The step of the last checkpoint, every file of which is checked; 0 if there is none."""
    found = latest(model_dir)
    if found is None:
        return 0
    stored = Checkpoint.open(found)
    for name in stored.names():
        stored.read(name)
    return stored.step


def test_twenty_kills(params: Path, whole: Checkpoint, tmp_path: Path, forks: Forks) -> None:
    """Some at a random moment, some when a checkpoint is seen being written, some while it starts."""
    command = ["train", "--params", params, "--model_dir", tmp_path / "killed"]
    flash = ["--dram", "250KB", "--flash", tmp_path / "flash"]
    rng, killed = random.Random(5), tmp_path / "killed"
    last = num_writing = 0
    for number in range(KILLS):
        before, began = num_lines(killed), time.monotonic()
        life = forks.start(*command, *(flash if rng.random() < 0.7 else []))
        if number % 5 == 4:
            time.sleep(rng.random() * 1.5)
        else:
            at_save, steps = number % 2 == 0, rng.randint(1, 4)
            wait_for(lambda: num_lines(killed) >= before + steps, began)  # noqa: B023 - called at once
            if at_save:
                wait_for(lambda: is_writing(killed), began)
            time.sleep(rng.random() * (0.005 if at_save else 0.05))
        life.kill()
        assert life.wait() == -signal.SIGKILL, f"life {number} ended by itself: {life.stderr.read()}"
        num_writing += is_writing(killed)
        step = whole_step(killed)
        assert step >= last
        last = step
    assert num_writing >= 3
    code, said = forks.run(*command, *flash)
    assert code == 0, said
    assert "resuming from" in said
    assert "on flash" in said
    assert_same(last_checkpoint(killed), whole)


def test_damaged_flash_files_end_the_run_and_the_same_command_resumes(
    params: Path, whole: Checkpoint, tmp_path: Path, forks: Forks
) -> None:
    flags = ["--dram", "250KB", "--flash", str(tmp_path / "flash")]
    process = forks.start("train", "--params", params, "--model_dir", tmp_path, *flags)
    process.read_until("step 5/")
    process.send_signal(signal.SIGSTOP)  # it must not finish while we look around
    # While it lives: nobody else may use the folder.
    code, said = forks.run("train", "--params", params, "--model_dir", tmp_path / "other", *flags)
    assert code == 2
    assert "is used by another run" in said
    process.send_signal(signal.SIGCONT)
    while process.poll() is None:  # again and again: what is written behind comes back
        for path in (tmp_path / "flash").glob("*.flash"):
            path.unlink(missing_ok=True)
        time.sleep(0.001)
    rest = process.stderr.read()
    assert process.wait() == 2, rest
    assert "Traceback" not in rest
    assert ".flash: No such file or directory" in rest
    assert "the same command resumes" in rest
    stopped = latest(tmp_path)
    assert stopped is not None
    assert 2 <= Checkpoint.open(stopped).step < STEPS
    code, said = forks.run("train", "--params", params, "--model_dir", tmp_path, *flags)
    assert code == 0, said
    assert_same(last_checkpoint(tmp_path), whole)
    assert os.listdir(tmp_path / "flash") == [".lock"]


def test_a_failed_checkpoint_does_not_end_the_run(
    params: Path, whole: Checkpoint, tmp_path: Path, forks: Forks
) -> None:
    process = forks.start("train", "--params", params, "--model_dir", tmp_path)
    process.read_until("step 5/")
    # A file where checkpoints go: saving fails, now and then, until it is taken away.
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "checkpoints").write_text("in the way")
    assert "training goes on" in process.read_until("cannot write checkpoint")
    process.read_until("step ")
    (tmp_path / "checkpoints").unlink()
    rest = process.stderr.read()
    assert process.wait() == 0, rest
    assert_same(last_checkpoint(tmp_path), whole)


def test_the_last_checkpoint_must_not_fail(params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path), "--num_steps", "3"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "cannot write checkpoint" in errors[-1]
    assert "step_00000003" in errors[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dram", "100KB"], "are missing; raise --dram or give a folder with --flash"),
        (["--dram", "10KB", "--flash", "{tmp}/flash"], "give at least --dram "),
        (["--dram", "much"], "--dram must be a size such as 4GiB or 500MB, got 'much'"),
        (["--dram", "250KB", "--flash", "{params}"], "cannot use flash folder"),
    ],
)
def test_mistakes_are_one_sentence(
    params: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.format(tmp=tmp_path, params=params) for flag in flags]
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
