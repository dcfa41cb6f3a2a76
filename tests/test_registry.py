"""Fetching from the package index with the real pip, and putting folders in place at once."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from openwafer import registry
from openwafer.errors import UserError
from openwafer.registry import Package

# A tiny pure-Python wheel (10 kB) that never changes.
INICONFIG = Package(
    name="iniconfig",
    version="2.0.0",
    sha256="b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374",
)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("OPENWAFER_CACHE", "")
    assert registry.cache_dir() == tmp_path / ".cache" / "openwafer"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert registry.cache_dir() == Path("/x/openwafer")
    monkeypatch.setenv("OPENWAFER_CACHE", "~/mine")
    assert registry.cache_dir() == tmp_path / "mine"


@pytest.mark.network
def test_download_yields_the_archive_and_removes_it() -> None:
    with registry.download(INICONFIG) as archive:
        assert archive.name == "iniconfig-2.0.0-py3-none-any.whl"
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == INICONFIG.sha256
    assert not archive.parent.exists()


@pytest.mark.network
def test_download_refuses_an_archive_with_another_hash() -> None:
    other = Package(name=INICONFIG.name, version=INICONFIG.version, sha256="0" * 64)
    with pytest.raises(UserError) as caught, registry.download(other):
        pytest.fail("the block must not run")
    assert str(caught.value) == (
        f"iniconfig==2.0.0 does not have SHA-256 {'0' * 64}: "
        "the download is damaged or not the file we know; nothing was kept"
    )


@pytest.mark.network
def test_an_unknown_package_is_one_sentence() -> None:
    missing = Package(name="openwafer-no-such-package", version="1.0", sha256="0" * 64)
    with pytest.raises(UserError) as caught, registry.download(missing):
        pytest.fail("the block must not run")
    assert re.fullmatch(
        r"could not download openwafer-no-such-package==1.0 with pip: "
        r"[^\n]*openwafer-no-such-package==1.0[^\n]*; check the network and try again",
        str(caught.value),
    )


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    script = (
        "from openwafer.registry import Package, download\n"
        "with download(Package(name='x', version='1', sha256='0')): pass"
    )
    root = Path(registry.__file__).parent.parent
    python = tmp_path / "bare" / "bin" / "python"
    done = subprocess.run([python, "-c", script], env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        f"x==1 with pip: {python} has no pip: run `{python} -m ensurepip` and try again"
    )


def test_staged_puts_everything_in_place_at_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with registry.staged(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text("a")
        assert not target.exists()
    assert (target / "sub" / "a.txt").read_text() == "a"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_staged_leaves_nothing_when_the_block_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with registry.staged(tmp_path / "model") as folder:
            (folder / "half.txt").write_text("half")
            raise RuntimeError("stopped half way")

    with pytest.raises(RuntimeError, match="stopped half way"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_staged_gives_the_permissions_of_an_ordinary_folder(tmp_path: Path) -> None:
    with registry.staged(tmp_path / "model"):
        pass
    (tmp_path / "ordinary").mkdir()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model", "ordinary")}
    assert len(modes) == 1


def test_staged_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught, registry.staged(tmp_path / "file" / "model"):
        pytest.fail("the block must not run")
    assert str(caught.value).startswith(f"cannot write in {tmp_path / 'file'}: ")
    assert "OPENWAFER_CACHE" in str(caught.value)


def test_staged_does_not_hide_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("precious")
    with pytest.raises(NotADirectoryError), registry.staged(tmp_path / "model") as folder:
        (folder / "a.txt").touch()
    assert (tmp_path / "model").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


RACER = """
import sys
from pathlib import Path
from openwafer.registry import staged

target, who = Path(sys.argv[1]), sys.argv[2]
with staged(target) as folder:
    for i in range(20):
        (folder / f"{i}.txt").write_text(who)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_two_processes_that_race_both_succeed_and_one_whole_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, target, who],
            cwd=Path(registry.__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in ("first", "second")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    assert not target.exists()
    for racer in racers:  # both are in their block: let both go
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate()
    assert [racer.returncode for racer in racers] == [0, 0]
    assert os.listdir(tmp_path) == ["model"]
    assert len(os.listdir(target)) == 20
    assert len({path.read_text() for path in target.iterdir()}) == 1
