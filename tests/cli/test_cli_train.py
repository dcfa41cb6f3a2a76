"""`openwafer train` as a user runs it: real processes, killed and resumed, with the same bits at the end."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import assert_same, tensors, write_params

from openwafer.checkpoint import Checkpoint, latest
from openwafer.cli.main import main
from openwafer.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 30
Forks = Any  # of conftest.py


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with dropout and clipping on a small corpus of our own."""
    folder = tmp_path_factory.mktemp("train")
    return write_params(folder, num_steps=STEPS, batch_size=6)


def command(params: Path, model_dir: Path, *flags: str) -> list[str]:
    base = [sys.executable, "-m", "openwafer", "train", "--params", str(params), "--model_dir", str(model_dir)]
    return [*base, *flags]


@pytest.fixture(scope="module")
def whole(params: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model_dir of a run that nobody disturbed."""
    model_dir = tmp_path_factory.mktemp("whole")
    assert main(["train", "--params", str(params), "--model_dir", str(model_dir), "--mode", "train_and_eval"]) == 0
    return model_dir


def test_it_learns_and_reports(whole: Path) -> None:
    records = read_metrics(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 1.0
    assert all(record["grad_norm"] > 0 and record["tokens_per_s"] > 0 for record in records)
    kept = sorted(folder.name for folder in (whole / "checkpoints").glob("step_*"))
    assert kept == ["step_00000020", "step_00000025", "step_00000030"]


def test_kept_activations_on_flash_and_a_trace_change_no_bit(
    params: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    flags = ["--recompute", "false", "--dram", "330KB", "--flash", str(tmp_path / "flash")]
    flags += ["--trace", str(trace), "--trace_steps", "3,5"]
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path / "run"), *flags]) == 0
    assert_same(tensors(tmp_path / "run", STEPS), tensors(whole, STEPS))

    events = json.loads(trace.read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(lanes[event["tid"]], []).append(event["name"])
    assert found["steps"] == ["step 3", "step 4", "step 5"]
    for direction in ("forward", "backward"):
        assert found["compute"].count(f"{direction} transformer.h.1") == 3
    assert found["update"].count("transformer.h.1") == 3
    assert found["data"] == ["batch"] * 3
    assert all(name.endswith(".flash") for name in found["flash read"] + found["flash write"])

    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert sum(record["spent_s"].values()) == pytest.approx(record["step_s"])
        assert record["spent_s"]["compute"] > 0
        assert record["spent_s"]["update"] > 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert all("s = " in line and "compute" in line for line in lines)


def test_resumed_after_sigkill_it_ends_with_the_same_bits(
    params: Path, whole: Path, tmp_path: Path, forks: Forks
) -> None:
    rng = random.Random(1)
    for _ in range(3):  # killed three times, at moments that depend on nothing
        process = forks.start("train", "--params", params, "--model_dir", tmp_path, "--log_every", "1")
        for _ in range(rng.randint(2, 8)):
            process.read_until("step ")
        time.sleep(rng.random() * 0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    # To its end as a shell would start it.
    done = subprocess.run(command(params, tmp_path), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert_same(tensors(tmp_path, STEPS), tensors(whole, STEPS))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_ctrl_c_saves_and_the_same_command_goes_on(params: Path, whole: Path, tmp_path: Path, forks: Forks) -> None:
    flags = ["train", "--params", params, "--model_dir", tmp_path, "--log_every", "1"]
    process = forks.start(*flags, "--trace", tmp_path / "trace.json", "--trace_steps", "1,99")
    process.read_until("step 7/")
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130, rest
    assert "the same command goes on from there" in rest
    assert "Traceback" not in rest
    stopped = latest(tmp_path)
    assert stopped is not None
    step = Checkpoint.open(stopped).step
    assert 7 <= step < STEPS
    traced = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert [name for name in traced if name.startswith("step ")] == [f"step {number + 1}" for number in range(step)]
    assert forks.run(*flags)[0] == 0
    assert_same(tensors(tmp_path, STEPS), tensors(whole, STEPS))


def test_micro_batches_change_the_result_only_by_rounding(params: Path, whole: Path, tmp_path: Path) -> None:
    no_dropout = tmp_path / "params.yaml"
    no_dropout.write_text(params.read_text().replace("dropout: 0.1", "dropout: 0.0"))
    results = []
    for size in ("2", "3", "6"):
        out = tmp_path / size
        assert main(["train", "--params", str(no_dropout), "--model_dir", str(out), "--micro_batch_size", size]) == 0
        results.append(read_metrics(out / "metrics.jsonl")[-1]["loss"])
    assert results == pytest.approx([results[0]] * 3, rel=1e-3)


def test_eval_mode_json(params: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--params", str(params), "--model_dir", str(whole), "--mode", "eval", "--json"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == STEPS
    assert 0 < summary["eval_loss"] < 5.7
    assert summary["checkpoint"].endswith("step_00000030")


def test_a_finished_run_has_nothing_left_to_do(params: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tensors(whole, STEPS)
    assert main(["train", "--params", str(params), "--model_dir", str(whole)]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert_same(tensors(whole, STEPS), before)


def test_skipped_steps_are_said(params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(params.read_text().replace("lr: 0.01", "lr: 1e30, nan: skip"))
    assert main(["train", "--params", str(own), "--model_dir", str(tmp_path / "run"), "--num_steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("step 3: skipped, its loss is not finite; checkpoint ")
    assert "loss nan  2 skipped" in err
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [False, True, True]


def test_two_runs_in_one_folder(params: Path, tmp_path: Path, forks: Forks) -> None:
    flags = ("train", "--params", params, "--model_dir", tmp_path)
    first = forks.start(*flags, "--num_steps", "100000", "--log_every", "1")
    first.read_until("step 1/")
    code, errors = forks.run(*flags)
    assert (code, errors) == (
        2,
        f"openwafer: another run is training in {tmp_path}: wait for it, or give this one its own --model_dir\n",
    )
    first.kill()
    first.wait()
    assert forks.run(*flags, "--num_steps", "2")[0] == 0  # the lock died with its holder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_steps=-3"], "--num_steps must be at least 0, got -3"),
        (["--num_steps", "many"], "--num_steps must be a whole number, got 'many'"),
        (["--mode", "trian"], "--mode must be one of train, eval, train_and_eval, got 'trian'"),
        (["--num_csx", "0"], "--num_csx must be at least 1, got 0"),
        (["--num_csx", "4"], "num_csx 4 is more than the 3 micro-batches of a step: use at most num_csx 3"),
        (["--min_csx", "2"], "min_csx 2 is more than num_csx 1"),
        pytest.param(
            ["--device", "cuda"],
            "device cuda: PyTorch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--num_step", "3"], "did you mean '--num_steps'?"),
        (["--params", "nowhere.yaml"], "no such file: nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence(
    params: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--params", str(params), "--model_dir", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_another_model_in_the_same_folder_is_refused(
    params: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "params.yaml"
    other.write_text(params.read_text().replace("num_hidden_layers: 2", "num_hidden_layers: 3"))
    assert main(["train", "--params", str(other), "--model_dir", str(whole)]) == 2
    assert "num_hidden_layers was 2, is 3" in capsys.readouterr().err


def test_what_changed_since_the_checkpoint_is_refused_or_said(
    params: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    command = ["train", "--params", str(params), "--model_dir", str(tmp_path / "run")]
    assert main([*command, "--num_steps", "31", "--seed", "1"]) == 2
    error = capfd.readouterr().err
    assert "step_00000030 was trained with another seed (seed was 0, is 1)" in error
    assert error.count("\n") == 1
    assert main([*command, "--mode", "eval", "--seed", "1"]) == 0  # which uses none of it
    assert main([*command, "--num_steps", "31", "--lr", "0.02"]) == 0
    assert "changed since" not in capfd.readouterr().err
    assert main([*command, "--num_steps", "32", "--batch_size", "8", "--micro_batch_size", "4"]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("changed since")]
    assert len(said) == 2
    assert "step_00000031: batch_size was 6, is 8: the order of samples goes on from another place" in said[0]
    assert "micro_batch_size was 2, is 4: from here on the run differs" in said[1]


def test_the_vendors_command_line(params: Path, tmp_path: Path) -> None:
    flags = ["--params", str(params), "--num_csx", "=", "1", "--model_dir=" + str(tmp_path), "--num_steps=2"]
    done = subprocess.run([sys.executable, "run.py", *flags, "--mode=train"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert latest(tmp_path) is not None


def test_what_was_trained_can_be_loaded(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(whole), "the wafer", "--max_tokens", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == 8
    assert set(answer["text"].split()) & {"wafer", "stream", "weight", "layer", "mesh", "of", "the", "a", "is", "sent"}
