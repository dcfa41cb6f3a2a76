"""Models with packed weights on the GPU's runner, against the same models with their weights unpacked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.load import open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.gguf_blocks import matrix_from_raw
from openwafer.serve.gpu.fast import TritonKernels
from openwafer.serve.gpu.invariant import InvariantKernels
from openwafer.serve.gpu.packed_weight import PackedWeight, device_bytes
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan import Look, Project
from openwafer.serve.gpu.runner import BLOCK_SIZE, GpuRunner
from openwafer.serve.gpu.tuning import Tile
from openwafer.serve.loading import load_program
from openwafer.serve.matrix import Matrix
from openwafer.serve.program import Embed, Linear, Operation, Program, Weights, build_program
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Batch
from tests.serve.conftest import CONFIGS, tiny_program
from tests.serve.gpu.test_fast import feed_last
from tests.serve.gpu.test_packed_products import PACKED
from tests.serve.gpu.test_packed_weight import random_raw
from tests.serve.test_native import TOKENS, feed

TIED = replace(CONFIGS["llama3"], num_hidden_layers=1)
# Blocks of Q4_K are of 256 inputs.
WIDE = replace(CONFIGS["llama"], hidden_size=256, num_heads=4, intermediate_size=256, num_hidden_layers=1)
# Few programs, because each takes a millisecond here, and many more rows than fit into one.
LARGE = Tile(num_outputs=128, num_inputs=32, num_warps=4, num_stages=2)
TUNING = replace(
    PACKED,
    packed_gemv=LARGE,
    byte_gemv=LARGE,
    packed_skinny=LARGE,
    byte_skinny=LARGE,
    prompt_rows=64,
    prompt_tokens=64,
)


def gpu_runner(program: Program, kernels: Kernels | None = None) -> GpuRunner:
    return GpuRunner(
        program,
        num_blocks=8,
        max_rows=64,
        max_sequences=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=kernels or PlainKernels(),
    )


def unpacked(program: Program) -> Program:
    """The same with fp32 weights that packing rounded."""
    made: dict[Matrix, Matrix] = {}

    def dense(matrix: Matrix) -> Matrix:
        return made.setdefault(matrix, Matrix.from_floats(matrix.dense(), "fp32"))

    def with_dense(operation: Operation) -> Operation:
        match operation:
            case Linear():
                return replace(operation, matrix=dense(operation.matrix))
            case Embed():
                return replace(operation, table=dense(operation.table))
        return operation

    return replace(program, body=tuple(map(with_dense, program.body)), head=tuple(map(with_dense, program.head)))


def gguf_program(type_name: str, config: ModelConfig) -> Program:
    """Random weights of one type of a GGUF file."""
    with torch.device("meta"):
        module = build(config)
    weights: Weights = {}
    for name, weight in module.named_parameters():
        if weight.dim() < 2:
            weights[name] = torch.ones(weight.shape)
        else:
            weights[name] = matrix_from_raw(random_raw(type_name, *weight.shape))
    return build_program(config, weights)


def definition(program: Program) -> np.ndarray:
    return feed(ReferenceRunner(unpacked(program), num_blocks=8, block_size=BLOCK_SIZE), [45])


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", "int8"), ("gemma3", "int4"), ("gpt", "int8"), ("qwen2", "int4"), ("odd", "int8"), ("odd", "int4")],
)
def test_logits_are_those_of_the_unpacked_weights(name: str, quantization: str) -> None:
    program = tiny_program(CONFIGS[name], quantization=quantization)
    np.testing.assert_allclose(feed(gpu_runner(program), [30, 1, 14]), definition(program), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_logits_of_gguf_types(type_name: str) -> None:
    program = gguf_program(type_name, WIDE)
    expected = definition(program)
    assert np.linalg.norm(feed(gpu_runner(program), [44, 1]) - expected) < 1e-4 * np.linalg.norm(expected)


def test_all_matrices_stay_packed() -> None:
    """A tied table is one matrix, looked up and multiplied with."""
    plan = gpu_runner(tiny_program(TIED, quantization="int4"))._plan
    weights = [step.weight for step in (*plan.body, *plan.head) if isinstance(step, Project)]
    assert len(weights) == 5
    assert all(isinstance(weight, PackedWeight) for weight in weights)
    assert [step.table for step in plan.body if isinstance(step, Look)] == [weights[-1]]


def test_all_bytes_of_a_plan_are_known_before() -> None:
    program = tiny_program(CONFIGS["odd"], quantization="int4")
    plan = gpu_runner(program)._plan
    held = [step.weight.nbytes for step in (*plan.body, *plan.head) if isinstance(step, Project)]
    linears = [op.matrix for op in (*program.body, *program.head) if isinstance(op, Linear)]
    assert sum(held) == sum(device_bytes(matrix, torch.bfloat16) for matrix in linears)


class TestKernels:
    """In Triton's interpreter."""

    pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

    @pytest.fixture(autouse=True)
    def triton(self) -> None:
        pytest.importorskip("triton", reason="there is no Triton for this platform")

    @pytest.mark.parametrize(("quantization", "pieces"), [("int4", [17, 1]), ("int8", [2, 1])])
    def test_logits_are_those_of_the_plain_operations(self, quantization: str, pieces: list[int]) -> None:
        """Several tiles of rows, few rows, one row."""
        program = tiny_program(TIED, quantization=quantization)
        found = feed_last(gpu_runner(program), pieces, TUNING)
        np.testing.assert_allclose(found, definition(program)[-sum(pieces) :], atol=5e-4, rtol=1e-4)

    def test_logits_of_large_batches(self) -> None:
        """Unpacked for the library's products."""
        program = tiny_program(TIED, quantization="int4")
        found = feed_last(gpu_runner(program), [30], TUNING)
        np.testing.assert_allclose(found, definition(program)[-30:], atol=5e-4, rtol=1e-4)

    def test_a_row_has_the_same_bits_in_every_batch(self) -> None:
        """A text at once, and in pieces beside a stranger's."""
        program = tiny_program(TIED, quantization="int4")
        tile = replace(LARGE, num_inputs=64)
        found = []
        for pieces, num_strange in (([18], 0), ([17, 1], 2)):
            gpu = gpu_runner(program, InvariantKernels(40, TUNING, tile, num_rows=16))
            start = 0
            for length in pieces:
                places = np.arange(start, start + length)
                batch = Batch(
                    tokens=np.concatenate([TOKENS[40 : 40 + num_strange], TOKENS[places]]),
                    positions=np.concatenate([np.arange(num_strange), places]).astype(np.int32),
                    sequences=np.array([0] * num_strange + [min(num_strange, 1)] * length, np.int32),
                    tables=np.array([[6, 1], [5, 2]] if num_strange else [[5, 2]], np.int32),
                    logit_rows=np.arange(num_strange, num_strange + length).astype(np.int32),
                )
                found.append(gpu.run(batch).copy())
                start += length
        assert found[0].tobytes() == np.concatenate(found[1:]).tobytes()
        np.testing.assert_allclose(found[0], definition(program)[:18], atol=5e-4, rtol=1e-4)

    @pytest.mark.network
    def test_smollm2(self, smollm2_path: Path) -> None:
        """The real file's first layer and its tied table of 49,152 tokens."""
        program = load_program(open_model(smollm2_path), EngineConfig())
        per_layer, rest = divmod(len(program.body) - 1, program.config.num_hidden_layers)
        assert rest == 0
        program = replace(program, body=program.body[: 1 + per_layer])
        large = Tile(num_outputs=2048, num_inputs=256, num_warps=4, num_stages=1)
        tuning = replace(TUNING, packed_gemv=large, byte_gemv=large, packed_skinny=large, byte_skinny=large)
        runners = gpu_runner(unpacked(program)), gpu_runner(program, TritonKernels(tuning))
        for tokens, start, wanted in ((TOKENS[:2], 0, []), (TOKENS[2:3], 2, [0])):
            batch = Batch(
                tokens=tokens * 100,
                positions=np.arange(start, start + len(tokens), dtype=np.int32),
                sequences=np.zeros(len(tokens), np.int32),
                tables=np.array([[3]], np.int32),
                logit_rows=np.array(wanted, np.int32),
            )
            expected, found = (runner.run(batch) for runner in runners)
            assert found.shape == (len(wanted), 49152)
            np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)
