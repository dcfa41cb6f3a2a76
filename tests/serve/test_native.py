"""The C kernels against the definition in PyTorch, and against the model itself."""

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from openwafer.serve.native import PAGE, NativeRunner
from openwafer.serve.program import Program
from openwafer.serve.reference import ReferenceRunner
from openwafer.serve.runner import Batch, Runner
from tests.serve.conftest import CONFIGS, tiny_module, tiny_program

TOKENS = np.random.default_rng(0).integers(0, 101, 45).astype(np.int32)
# Blocks of a sequence need not be neighbours.
TABLE = np.array([[5, 2, 7, 0, 3]], np.int32)


def native(program: Program, num_threads: int = 2, half_cache: bool = False, max_rows: int = 64) -> NativeRunner:
    return NativeRunner(program, num_blocks=8, max_rows=max_rows, half_cache=half_cache, num_threads=num_threads)


def feed(runner: Runner, pieces: list[int], tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits of all tokens, computed in pieces."""
    logits, start = [], 0
    for length in pieces:
        stop = start + length
        batch = Batch(
            tokens=tokens[start:stop].copy(),
            positions=np.arange(start, stop, dtype=np.int32),
            sequences=np.zeros(length, np.int32),
            tables=TABLE,
            logit_rows=np.arange(length, dtype=np.int32),
        )
        logits.append(runner.run(batch))
        start = stop
    assert start == len(tokens)
    return np.concatenate(logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_model(name: str) -> None:
    config = CONFIGS[name]
    with torch.inference_mode():
        expected = tiny_module(config)(torch.from_numpy(TOKENS)[None].long())[0].numpy()
    program = tiny_program(config)
    runner = native(program)
    np.testing.assert_allclose(feed(runner, [30, 1, 14]), expected, atol=2e-4, rtol=1e-4)
    runner.close()
    reference = ReferenceRunner(program, num_blocks=8, block_size=PAGE)
    np.testing.assert_allclose(feed(reference, [30, 1, 14]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bf16"}, {"dtype": "fp16"}]
)
@pytest.mark.parametrize("name", ["qwen2", "gpt", "odd"])
def test_packed_weights_give_the_logits_of_the_definition(name: str, options: dict[str, str]) -> None:
    program = tiny_program(CONFIGS[name], **options)
    runner = native(program)
    expected = feed(ReferenceRunner(program, num_blocks=8, block_size=PAGE), [45])
    np.testing.assert_allclose(feed(runner, [45]), expected, atol=5e-3, rtol=1e-3)
    runner.close()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "fp16"}])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt", "odd"])
def test_a_row_has_the_same_bits_however_the_prompt_is_cut(name: str, options: dict[str, str]) -> None:
    program = tiny_program(CONFIGS[name], **options)
    half_cache = program.is_packed
    results = []
    for num_threads, pieces in ((1, [45]), (2, [1] * 45), (2, [7, 8, 16, 3, 2, 9])):
        runner = native(program, num_threads, half_cache)
        results.append(feed(runner, pieces))
        runner.close()
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_more_rows_and_inputs_than_a_kernel_keeps_at_once(quantization: str) -> None:
    """80 rows, and products of 2100 inputs, together and one by one."""
    config = dataclasses.replace(CONFIGS["odd"], intermediate_size=2100, num_hidden_layers=1)
    program = tiny_program(config, quantization=quantization)
    runner = native(program, num_threads=1, half_cache=True, max_rows=80)
    tokens = np.resize(TOKENS, 80)
    together, alone = feed(runner, [80], tokens), feed(runner, [1] * 80, tokens)
    runner.close()
    assert together.tobytes() == alone.tobytes()


def test_the_definition_does_not_depend_on_the_batch_either() -> None:
    program = tiny_program(CONFIGS["qwen2"], quantization="int4")
    results = [feed(ReferenceRunner(program, num_blocks=8, block_size=PAGE), pieces) for pieces in ([45], [20, 25])]
    assert results[0].tobytes() == results[1].tobytes()


def test_keys_in_half_precision_stay_close(request: pytest.FixtureRequest) -> None:
    program = tiny_program(CONFIGS["llama"])
    whole, half = native(program), native(program, half_cache=True)
    first, second = feed(whole, [45]), feed(half, [45])
    np.testing.assert_allclose(first, second, atol=0.05)
    assert first.tobytes() != second.tobytes()
    whole.close()
    half.close()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() == "x86_64", reason="the tests above run what the processor has")
@pytest.mark.parametrize("more", [(), ("AMX_INT8",)])
def test_the_loops_for_avx512_with_its_instructions_emulated(tmp_path: Path, more: tuple[str, ...]) -> None:
    """The tests above, in a process whose kernels are compiled as for such a processor (see avx512/immintrin.h)."""
    has = [f"-D__{name}__" for name in ("AVX2", "F16C", "AVX512F", "AVX512BW", "AVX512VNNI", *more)]
    flags = [f"-I{Path(__file__).parent / 'avx512'}", "-U__ARM_NEON", "-U__ARM_FEATURE_DOTPROD", *has]
    compiler = tmp_path / "cc"  # little optimisation: compiling the emulation takes longer than running it
    compiler.write_text(f'#!/bin/sh\nexec cc {" ".join(flags)} "$@" -O1\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CC": str(compiler), "OPENWAFER_CACHE": str(tmp_path)}
    which = "(packed_weights or same_bits) and odd or keeps_at_once"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, "-k", which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert list(tmp_path.glob("kernels/decoder-*.so"))
