"""`openwafer pull`: where things go, and what it says."""

import json
from pathlib import Path

import pytest

from openwafer.cli.main import main


@pytest.mark.network
def test_pull_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "smollm2"
    assert main(["pull", "smollm2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{folder}\n"
    assert "Apache-2.0" in shown.err
    assert main(["pull", "smollm2", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"name": "smollm2", "kind": "model", "path": str(folder)}
    assert "already there" in shown.err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("shakespear", "did you mean 'shakespeare'"),
        ("x", "huggingface_hub"),
    ],
)
def test_unknown_name(capsys: pytest.CaptureFixture[str], name: str, hint: str):
    assert main(["pull", name]) == 2
    assert hint in capsys.readouterr().err
