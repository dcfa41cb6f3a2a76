"""Where nothing can be compiled, training goes on with the definitions: slower, with the same bits."""

import logging
import shutil
from pathlib import Path

import pytest

from openwafer.kernels import compiled
from openwafer.kernels.compiled import library

build = library.__wrapped__  # without the memory of earlier calls


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build("adamw") is None
    assert "no C compiler (no-such-compiler) on this machine" in caplog.text
    assert "the slower reference of adamw runs instead" in caplog.text


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "false")
    assert build("adamw") is None
    assert "false could not compile" in caplog.text


def test_a_cache_that_cannot_be_written(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    own_cache.write_text("in the way")
    assert build("adamw") is None
    assert "set OPENWAFER_CACHE" in caplog.text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_damaged_library_in_the_cache_is_not_used(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert build("adamw") is not None
        assert caplog.text == ""
        (built,) = own_cache.rglob("*.so")
        copy = own_cache.parent / "other"
        damaged = copy / built.relative_to(own_cache)
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(built.read_bytes()[:100])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENWAFER_CACHE", str(copy))
            assert build("adamw") is None
    assert "cannot load" in caplog.text


def test_a_source_with_a_mistake_says_which(tmp_path: Path) -> None:
    (tmp_path / "bad.c").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(compiled.NoCompiler, match=r"could not compile bad"):
        compiled.compiled("bad", [tmp_path / "bad.c"])
