"""A kernel that is too large says which flag to change, and to what; that fits, and the next value would not."""

import re
from typing import Any

import pytest

from openwafer.errors import UserError
from openwafer.fabric.kernels.catalog import KERNELS
from openwafer.fabric.kernels.fitting import run_fitting
from openwafer.fabric.kernels.outcome import Setting
from openwafer.systems import WSE2

# Options of a kernel that is too large, and by how much each flag of the advice can be changed at least.
TOO_LARGE: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("broadcast", {"width": 2, "height": 2, "words": 50_000}, {"words": 1}),
    ("scatter", {"num_pes": 30, "words": 500}, {"words": 1, "num_pes": 1}),
    ("gather", {"num_pes": 30, "words": 500}, {"words": 1, "num_pes": 1}),
    ("reduce", {"num_pes": 3, "words": 12_289}, {"words": 1}),
    ("allreduce", {"num_pes": 5, "words": 12_289}, {"words": 1}),
    ("gemv", {"grid": 4, "size": 640, "group": 2}, {"size": 4}),
    ("gemm", {"grid": 2, "size": 120}, {"size": 2}),
    ("gemm", {"grid": 2, "size": 200, "algorithm": "mesh"}, {"size": 2}),
    ("axpy", {"num_pes": 1, "tokens": 600, "outputs": 8}, {"tokens": 1, "inputs": 1}),
    ("spmm", {"width": 4, "height": 2, "size": 128, "density": 1.0}, {"size": 4, "columns": 1, "density": 0.001}),
    ("stencil", {"width": 2, "height": 2, "depth": 9000}, {"depth": 1}),
    ("softmax", {"num_pes": 2, "size": 12_287}, {"size": 1}),
    ("rmsnorm", {"num_pes": 2, "size": 5000}, {"size": 1}),
    ("decode", {"grid": 4, "width": 400, "feed_forward": 80, "context": 8, "group": 2}, {"width": 4}),
]


def run(name: str, options: dict[str, Any]) -> bool:
    kernel = KERNELS[name]
    return run_fitting(kernel, kernel.config(**options), WSE2, Setting(engine="c")).is_right


@pytest.mark.parametrize(("name", "options", "steps"), TOO_LARGE, ids=[name for name, _, _ in TOO_LARGE])
def test_the_advice_is_the_largest_that_fits(name: str, options: dict[str, Any], steps: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"takes more than the 49,152 bytes of a PE of wse2: ") as caught:
        run(name, options)
    lower = {flag: float(value) for flag, value in re.findall(r"lower --(\w+) to ([\d.]+) or less", str(caught.value))}
    assert set(lower) == set(steps)
    for flag, value in lower.items():
        kind = type(steps[flag])
        assert run(name, {**options, flag: kind(value)})
        with pytest.raises(UserError, match="takes more than"):
            run(name, {**options, flag: kind(value + steps[flag])})


def test_more_pes_are_advised_where_each_would_hold_less() -> None:
    options = {"grid": 4, "size": 640, "group": 2}
    with pytest.raises(UserError, match=r"or raise --grid to 5$"):
        run("gemv", options)
    assert run("gemv", {**options, "grid": 5})


def test_too_many_pes_name_their_flags() -> None:
    with pytest.raises(UserError, match="800 x 64 PEs does not fit wse2: at most 750 x 994: lower --width or --height"):
        run("broadcast", {"width": 800})
    with pytest.raises(UserError, match="751 x 1 PEs does not fit wse2: at most 750 x 994: lower --num_pes"):
        run("gather", {"num_pes": 750})


def test_too_many_streams_get_another_group() -> None:
    sizes = {"grid": 16, "width": 32, "feed_forward": 16, "context": 16, "heads": 2}
    with pytest.raises(UserError, match="--group 6 gives a PE of wse2 too many streams: use ") as caught:
        run("decode", {**sizes, "group": 6})
    assert run("decode", {**sizes, "group": int(str(caught.value).split()[-1])})
