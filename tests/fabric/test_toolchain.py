"""Building the C engine: cached by source, and a clear fallback where it cannot be built."""

from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.fabric import Layout, Simulation, engine, toolchain
from openwafer.systems import WSE2


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OPENWAFER_CACHE", str(tmp_path))
    engine.library.cache_clear()
    yield tmp_path
    engine.library.cache_clear()


def layout() -> Layout:
    small = Layout(WSE2, 1, 1)

    def program(pe) -> None:
        x = pe.array("x", 4)
        with pe.task("main", start=True):
            pe.add(x, x, x)

    small.place(program)
    return small


def test_the_engine_is_compiled_once(fresh_cache: Path) -> None:
    toolchain.load()
    (built,) = (fresh_cache / "kernels").iterdir()
    written = built.stat().st_mtime_ns
    toolchain.load()
    assert built.stat().st_mtime_ns == written


def test_without_a_compiler_the_reference_runs_and_says_so(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match=r"no C compiler \(no-such-compiler\).*slow reference"):
        simulation = Simulation(layout())
    assert simulation.engine == "reference"
    assert simulation.run().cycles == WSE2.costs.task_start + 10  # both operands in one bank
    with pytest.raises(UserError, match="install gcc or clang, or set CC"):
        Simulation(layout(), engine="c")
