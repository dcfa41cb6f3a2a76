"""`openwafer train` on flash: killed twenty times, its files damaged, checkpoints failing; the bits stay the same."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openwafer.checkpoint import Checkpoint, latest
from openwafer.cli.main import main
from openwafer.data.prepare import PrepareConfig, prepare

ROOT = Path(__file__).parents[2]
STEPS = 80
KILLS = 20

# Runs the command in forks of a process that has everything imported, and kills them: some at a random moment,
# some when a checkpoint is seen being written. Prints for each kill whether one was.
KILLER = """
import os, pathlib, random, signal, sys, time
import torch
torch.set_num_threads(1)  # no threads yet, so that forks are whole
from openwafer.checkpoint import Checkpoint, latest
from openwafer.cli.main import main
import openwafer.train.job, openwafer.params

params, folder, kills = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
rng = random.Random(5)

def start(model_dir, flags):
    pid = os.fork()
    if pid == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if "loud" not in flags:
            os.dup2(quiet, 2)
        code = 1
        try:
            flags = [flag for flag in flags if flag != "loud"]
            code = main(["train", "--params", params, "--model_dir", str(model_dir), *flags])
        finally:
            os._exit(code)
    return pid

def writing(model_dir):
    return any(".new." in path.name for path in (model_dir / "checkpoints").glob(".step_*"))

def num_lines(model_dir):
    log = model_dir / "metrics.jsonl"
    return log.read_bytes().count(b"\\n") if log.exists() else 0

flash = ["--dram", "250KB", "--flash", str(folder / "flash")]
assert os.waitpid(start(folder / "whole", ["loud"]), 0)[1] == 0  # here too: threads must not differ
killed = folder / "killed"
last = 0
for number in range(kills):
    pid = start(killed, flash if rng.random() < 0.7 else [])
    before, began = num_lines(killed), time.monotonic()
    if number % 5 == 4:
        time.sleep(rng.random() * 1.5)  # also while it starts
    else:
        at_save = number % 2 == 0
        steps = rng.randint(1, 4)
        while time.monotonic() - began < 60 and num_lines(killed) < before + steps:
            time.sleep(0.002)
        while time.monotonic() - began < 60 and at_save and not writing(killed):
            pass
        time.sleep(rng.random() * (0.005 if at_save else 0.05))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert status == signal.SIGKILL, f"life {number} ended by itself: {status}"
    was_writing = writing(killed)
    found = latest(killed)
    step = 0
    if found is not None:
        stored = Checkpoint.open(found)
        step = stored.step
        for name in stored.names():
            stored.read(name)  # checks every file
    assert step >= last, (step, last)
    last = step
    print("killed at", step, "writing" if was_writing else "", flush=True)
assert os.waitpid(start(killed, ["loud", *flash]), 0)[1] == 0
print("done")
"""


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
def whole(params: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """What a run ends with that nobody disturbed and that has all in DRAM."""
    model_dir = tmp_path_factory.mktemp("whole")
    assert main(["train", "--params", str(params), "--model_dir", str(model_dir)]) == 0
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


def test_twenty_kills(params: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(params), str(tmp_path), str(KILLS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [line for line in done.stdout.splitlines() if line.startswith("killed at")]
    assert len(kills) == KILLS
    assert sum("writing" in line for line in kills) >= 3, kills
    assert "resuming from" in done.stderr
    assert "on flash" in done.stderr
    assert_same(last_checkpoint(tmp_path / "killed"), last_checkpoint(tmp_path / "whole"))


def start(params: Path, model_dir: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openwafer", "train", "--params", str(params), "--model_dir", str(model_dir)]
    return subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            break
    return lines


def test_damaged_flash_files_end_the_run_and_the_same_command_resumes(
    params: Path, whole: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dram", "250KB", "--flash", str(tmp_path / "flash")]
    process = start(params, tmp_path, *flags)
    read_until(process, "step 5/")
    process.send_signal(signal.SIGSTOP)  # it must not finish while we look around
    # While it lives: nobody else may use the folder.
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path / "other"), *flags]) == 2
    assert "is used by another run" in capsys.readouterr().err
    process.send_signal(signal.SIGCONT)
    while process.poll() is None:  # again and again: what is written behind comes back
        for path in (tmp_path / "flash").glob("*.flash"):
            path.unlink(missing_ok=True)
    rest = "".join(read_until(process, "cannot read"))
    assert process.wait(30) == 2, rest
    assert process.stderr is not None
    rest += process.stderr.read()  # a checkpoint under way may have complained first
    process.stderr.close()
    assert "Traceback" not in rest
    assert ".flash: No such file or directory" in rest
    assert "the same command resumes" in rest
    stopped = latest(tmp_path)
    assert stopped is not None
    assert 2 <= Checkpoint.open(stopped).step < STEPS
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path), *flags]) == 0
    assert_same(last_checkpoint(tmp_path), whole)
    assert os.listdir(tmp_path / "flash") == [".lock"]


def test_a_failed_checkpoint_does_not_end_the_run(params: Path, whole: Checkpoint, tmp_path: Path) -> None:
    process = start(params, tmp_path)
    read_until(process, "step 5/")
    # A file where checkpoints go: saving fails, now and then, until it is taken away.
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "checkpoints").write_text("in the way")
    seen = "".join(read_until(process, "cannot write checkpoint"))
    assert "training goes on" in seen
    read_until(process, "step ")
    (tmp_path / "checkpoints").unlink()
    assert process.stderr is not None
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, rest
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
