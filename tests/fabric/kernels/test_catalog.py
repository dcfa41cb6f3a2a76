"""Every kernel computes what NumPy computes, and its closed formula is within 5 % of the simulation."""

import pytest

from openwafer.fabric.kernels.catalog import KERNELS
from openwafer.fabric.kernels.outcome import Setting
from openwafer.systems import WAFERS

SMALL = [
    ("broadcast", {"width": 9, "height": 7, "words": 40}),
    ("scatter", {"num_pes": 9, "words": 5}),
    ("gather", {"num_pes": 9, "words": 20}),
    ("reduce", {"num_pes": 17, "words": 40}),
    ("reduce", {"num_pes": 20, "words": 40, "algorithm": "two_phase", "step": 4}),
    ("reduce", {"num_pes": 32, "words": 40, "algorithm": "tree"}),
    ("allreduce", {"num_pes": 21, "words": 30, "algorithm": "pipelined"}),
    ("allreduce", {"num_pes": 34, "words": 30, "algorithm": "two_level", "group": 5}),
    ("gemv", {"grid": 12, "size": 96, "group": 4}),
    ("gemv", {"grid": 6, "size": 24, "algorithm": "pipelined", "dtype": "f32"}),
    ("gemm", {"grid": 6, "size": 48, "algorithm": "summa"}),
    ("gemm", {"grid": 7, "size": 56, "algorithm": "summa", "dtype": "f32"}),
    ("gemm", {"grid": 6, "size": 48, "algorithm": "mesh"}),
    ("gemm", {"grid": 8, "size": 64, "algorithm": "mesh", "dtype": "bf16"}),
    ("axpy", {"num_pes": 3, "tokens": 64, "inputs": 12, "outputs": 8, "sparsity": 0.5}),
    ("spmm", {"width": 4, "height": 3, "size": 24, "columns": 20, "density": 0.3}),
    ("spmm", {"width": 3, "height": 2, "size": 12, "columns": 20, "density": 0.3, "algorithm": "coo"}),
    ("stencil", {"width": 5, "height": 4, "depth": 64, "steps": 2}),
    ("softmax", {"num_pes": 60, "size": 16}),
    ("decode", {"grid": 24, "width": 168, "feed_forward": 480, "context": 168, "group": 5}),
    ("decode", {"grid": 24, "width": 288, "feed_forward": 480, "context": 240, "heads": 4, "kv_heads": 2}),
    ("rmsnorm", {"num_pes": 60, "size": 16}),
]


# Short vectors, groups of unequal size, lines of odd length, operands that meet in a bank.
ODD = [
    ("scatter", {"num_pes": 40, "words": 1}),
    ("gather", {"num_pes": 40, "words": 1}),
    ("gather", {"num_pes": 5, "words": 60}),
    ("reduce", {"num_pes": 9, "words": 1, "algorithm": "tree"}),
    ("reduce", {"num_pes": 60, "words": 1, "algorithm": "two_phase", "step": 16}),
    ("reduce", {"num_pes": 9, "words": 3, "algorithm": "two_phase", "step": 600}),
    ("allreduce", {"num_pes": 9, "words": 3, "group": 2}),
    ("allreduce", {"num_pes": 2, "words": 700, "group": 40}),
    ("gemv", {"grid": 10, "size": 120, "group": 15, "dtype": "bf16"}),
    ("gemm", {"grid": 2, "size": 6, "algorithm": "mesh"}),
    ("axpy", {"num_pes": 7, "tokens": 3, "inputs": 40, "outputs": 30, "sparsity": 0.99}),
    ("axpy", {"num_pes": 1, "tokens": 20, "inputs": 3, "outputs": 2, "sparsity": 0.5}),
    ("spmm", {"width": 8, "height": 3, "size": 96, "columns": 7, "density": 0.1}),
    ("axpy", {"num_pes": 3, "tokens": 86, "inputs": 19, "outputs": 1, "sparsity": 0.03}),
    ("spmm", {"width": 5, "height": 4, "size": 60, "columns": 34, "density": 0.86}),
    ("stencil", {"width": 2, "height": 2, "depth": 300, "steps": 4}),
    # Rows that are through with their scores while others still sum up queries, keys and values.
    ("decode", {"grid": 4, "width": 64, "feed_forward": 12, "context": 12, "group": 2}),
    ("decode", {"grid": 8, "width": 128, "feed_forward": 160, "context": 16, "group": 4}),
    ("softmax", {"num_pes": 40, "size": 1}),
    ("rmsnorm", {"num_pes": 7, "size": 60, "group": 2}),
]


@pytest.mark.parametrize("chip", ["wse2", "wse3"])
@pytest.mark.parametrize(("name", "options"), SMALL + ODD, ids=lambda value: value if isinstance(value, str) else "")
def test_values_and_formula(name: str, options: dict, chip: str) -> None:
    kernel = KERNELS[name]
    outcome = kernel.run(kernel.config(**options), WAFERS[chip], Setting(engine="c"))
    assert outcome.is_right, outcome.max_error
    assert abs(outcome.formula_error) < 0.05, (outcome.report.cycles, outcome.formula_cycles)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scatter", {"num_pes": 4, "words": 5}),
        ("gather", {"num_pes": 4, "words": 9}),
        ("allreduce", {"num_pes": 9, "words": 12, "group": 3}),
        ("gemm", {"grid": 3, "size": 6, "algorithm": "summa"}),
        ("gemm", {"grid": 4, "size": 8, "algorithm": "mesh"}),
        ("axpy", {"num_pes": 2, "tokens": 8, "inputs": 6, "outputs": 3, "sparsity": 0.4}),
        ("stencil", {"width": 3, "height": 2, "depth": 12, "steps": 2}),
        ("softmax", {"num_pes": 7, "size": 3, "group": 3}),
        ("decode", {"grid": 4, "width": 8, "feed_forward": 12, "context": 4, "group": 2}),
        ("decode", {"grid": 4, "width": 16, "feed_forward": 12, "context": 8, "group": 2, "heads": 2, "kv_heads": 1}),
        ("gemv", {"grid": 3, "size": 360, "group": 2}),  # vectors that fill the write buffer
    ],
)
def test_the_reference_takes_the_same_cycles(name: str, options: dict) -> None:
    kernel = KERNELS[name]
    fast, slow = (
        kernel.run(kernel.config(**options), WAFERS["wse3"], Setting(engine=engine)) for engine in ("c", "reference")
    )
    assert fast.report.cycles == slow.report.cycles
    assert fast.report.pe_utilisation == slow.report.pe_utilisation
    assert fast.report.link_utilisation == slow.report.link_utilisation
    assert fast.report.stalls == slow.report.stalls
    assert fast.simulation.image.memory.tobytes() == slow.simulation.image.memory.tobytes()


@pytest.mark.parametrize("num_pes", [2, 5, 18, 23])
@pytest.mark.parametrize("algorithm", ["chain", "two_phase", "tree"])
def test_reductions_of_odd_lengths(num_pes: int, algorithm: str) -> None:
    kernel = KERNELS["reduce"]
    config = kernel.config(num_pes=num_pes, words=7, algorithm=algorithm, step=4)
    assert kernel.run(config, WAFERS["wse2"], Setting(engine="c")).is_right


@pytest.mark.parametrize("num_pes", [2, 5, 16, 31])
@pytest.mark.parametrize("algorithm", ["pipelined", "two_level"])
def test_all_reductions_of_odd_lengths(num_pes: int, algorithm: str) -> None:
    kernel = KERNELS["allreduce"]
    config = kernel.config(num_pes=num_pes, words=7, algorithm=algorithm, group=5)
    assert kernel.run(config, WAFERS["wse3"], Setting(engine="c")).is_right


def test_cycles_fall_almost_linearly_with_sparsity() -> None:
    kernel = KERNELS["axpy"]
    shape = {"num_pes": 2, "tokens": 128, "inputs": 48, "outputs": 32}
    dense, sparse = (
        kernel.run(kernel.config(sparsity=s, **shape), WAFERS["wse2"], Setting(engine="c")).report.cycles
        for s in (0.0, 0.9)
    )
    assert 8.5 < dense / sparse < 10.5
