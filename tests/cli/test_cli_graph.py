"""`openwafer graph`: the table of Units, for people and scripts, at any size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openwafer.cli.main import main

ROOT = Path(__file__).parents[2]
LIMITED = """
import resource, sys, time
from openwafer.cli.main import main
import torch  # not part of the capture
for preset in sys.argv[1:]:
    began = time.process_time()
    assert main(["graph", "--params", preset, "--json"]) == 0
    seconds = time.process_time() - began
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seconds} {megabytes}", file=sys.stderr)
"""


def test_giants_are_captured_in_seconds_and_megabytes() -> None:
    """At most 15 s and 2 GiB, the command's imports included."""
    giants = {"llama2_70b": 80, "gpt3_175b": 96}  # layers
    done = subprocess.run([sys.executable, "-c", LIMITED, *giants], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    for line, layers in zip(done.stderr.splitlines()[-2:], giants.values(), strict=True):
        seconds, megabytes = map(float, line.split())
        assert seconds <= 15
        assert megabytes <= 2048
        table, end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].lstrip()
        assert table["num_units"] == layers + 2
        assert table["num_functions"] <= 4


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "--params", "gpt_tiny", "--micro-batch-size", "2", "--context=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["unit", "name", "code", "parameters"]
    assert lines[1].split()[:3] == ["0", "transformer.wte", "f0"]
    assert lines[2].startswith("1-4")
    assert lines[-1].startswith("2,197,632 parameters (8.4 MiB), 6 Units, 3 distinct")


def test_json_has_shapes_flops_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "--params", "smollm2_135m", "--context", "32", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["num_parameters"] == 134_515_008
    assert table["weight_bytes"] == 4 * 134_515_008
    block = table["units"][1]
    assert block["name"] == "model.layers.0"
    assert block["output_bytes"] == 32 * 576 * 4
    parameters = 576 * 576 * 2 + 2 * 192 * 576 + 3 * 576 * 1536
    attention = 2 * 2 * 32 * 32 * 576
    assert block["forward_flops"] == 2 * 32 * parameters + attention
    assert "model.embed_tokens.weight" in table["units"][-1]["weights"], "the tied head reads the embedding"
    assert table["units"][-1]["num_parameters"] == 576, "but the embedding is stored once, with its first user"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--params"),
        (["--params", "gpt_tiny", "--context", "0"], "--context must be at least 1, got 0"),
        (["--params", "gpt_tiny", "--micro_batch_size", "x"], "--micro_batch_size must be a whole number, got 'x'"),
        (["--params", "gpt_tiny", "--context", "4096"], "4096"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
