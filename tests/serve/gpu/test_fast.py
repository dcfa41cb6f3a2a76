"""The Triton kernels in Triton's interpreter against the plain operations; `interpreted.py` says what that shows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from openwafer.errors import UserError
from openwafer.serve.engine import EngineConfig, LocalEngine
from openwafer.serve.gpu.fast import TritonKernels, best_kernels, tiles_of
from openwafer.serve.gpu.invariant import InvariantKernels
from openwafer.serve.gpu.places import Places, Run, most_numbers, packed, runs_of, unpacked
from openwafer.serve.gpu.plain import PlainKernels
from openwafer.serve.gpu.plan import Attention, Project
from openwafer.serve.gpu.runner import GpuRunner
from openwafer.serve.gpu.tuning import Tile, Tuning
from openwafer.serve.program import Attend, Norm, Span
from openwafer.serve.runner import Batch
from tests.serve.conftest import CONFIGS, Client, tiny_program
from tests.serve.test_native import TABLE, TOKENS, feed

pytest.importorskip("triton", reason="there is no Triton for this platform")
# The exponential of a large number is infinite, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

# Small tiles, so that tiny models have several of each, and some that stick out.
TUNING = Tuning(
    gemv=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=1),
    skinny=Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=2),
    decode_tokens=16,
    num_programs=8,
    prompt_rows=16,
    prompt_tokens=16,
    library_attention_rows=25,
)
# Few layers, because each program takes a millisecond here; Gemma's two are one with a window and one without.
SHAPES = {name: replace(CONFIGS[name], num_hidden_layers=1) for name in ("llama", "gpt")}
SHAPES["gemma3"] = replace(CONFIGS["gemma3"], num_hidden_layers=2, sliding_window_pattern=2)


def runner(name: str, tuning: Tuning | None, dtype: torch.dtype = torch.float32, num_blocks: int = 8) -> GpuRunner:
    """With the fast kernels, or without a tuning the plain ones."""
    return GpuRunner(
        tiny_program(SHAPES[name]),
        num_blocks=num_blocks,
        max_rows=64,
        max_sequences=8,
        device=torch.device("cpu"),
        dtype=dtype,
        kernels=TritonKernels(tuning) if tuning else PlainKernels(),
    )


def feed_last(runner: GpuRunner, pieces: list[int], tuning: Tuning) -> np.ndarray:
    """Logits of the last of TOKENS, in pieces and by the fast kernels; those before are computed by the plain ones."""
    logits, start = [], 0
    for length in (len(TOKENS) - sum(pieces), *pieces):
        stop = start + length
        batch = Batch(
            tokens=TOKENS[start:stop].copy(),
            positions=np.arange(start, stop, dtype=np.int32),
            sequences=np.zeros(length, np.int32),
            tables=TABLE,
            logit_rows=np.arange(length, dtype=np.int32),
        )
        logits.append(runner.run(batch).copy())
        runner._kernels = TritonKernels(tuning)
        start = stop
    return np.concatenate(logits[1:])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_plain_operations(name: str) -> None:
    """Tiles of a prompt's middle, rows one by one, a single row."""
    expected = feed(runner(name, None), [45])[-12:]
    np.testing.assert_allclose(feed_last(runner(name, None), [9, 2, 1], TUNING), expected, atol=2e-4, rtol=1e-4)


def test_logits_of_large_batches() -> None:
    """No rows are few: the library's products, with our norms and gates around them, and its attention for prompts."""
    tuning = replace(TUNING, skinny_rows=0)
    expected = feed(runner("llama", None), [45])
    np.testing.assert_allclose(feed(runner("llama", tuning), [44, 1]), expected, atol=2e-4, rtol=1e-4)


def test_fp16_stays_close() -> None:
    """The interpreter has no bf16 products."""
    expected = feed(runner("llama", None), [45])[-10:]
    found = feed_last(runner("llama", None, torch.float16), [9, 1], TUNING)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", None])
@pytest.mark.parametrize("gated", [False, True])
def test_every_kind_of_product(num_rows: int, kind, gated: bool) -> None:
    """Outputs and inputs that fill no tile, biases, norms; written and added."""
    if gated and kind is None:
        return
    generator = torch.Generator().manual_seed(0)
    span = Span("x", 0, 50)
    # 21 is a tile and a bit.
    weight = fenced(torch.randn(2 * 21 if gated else 21, 50, generator=generator))
    gain = fenced(torch.rand(50, generator=generator))
    norm = Norm(dst=span, src=span, weight=gain, bias=None, eps=1e-5, centred=False)
    bias = fenced(torch.randn(weight.shape[0], generator=generator))
    src = fenced(torch.randn(num_rows, 50, generator=generator))
    kernels = TritonKernels(TUNING)
    for step in (
        Project(dst=span, src=span, weight=weight, norm=norm, bias=bias, activation=kind, gated=gated),
        Project(dst=span, src=span, weight=weight, activation=kind, gated=gated),
    ):
        expected = PlainKernels().project(step, src, wide=True)
        torch.testing.assert_close(kernels.project(step, src, wide=True), expected, atol=1e-4, rtol=1e-4)
        dst = fenced(torch.ones(num_rows, 21))
        kernels.project_into(step, src, dst)
        torch.testing.assert_close(dst, expected + 1, atol=1e-4, rtol=1e-4)
        assert is_fence_whole(dst)


FENCE = 512


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """The same with numbers around it that are none: whoever reads them shows it, whoever writes them is found."""
    memory = torch.full((tensor.numel() + 2 * FENCE,), float("nan"), dtype=tensor.dtype)
    inner = memory[FENCE:-FENCE].view(tensor.shape)
    return inner.copy_(tensor)


def is_fence_whole(tensor: torch.Tensor) -> bool:
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return bool(memory[:FENCE].isnan().all() and memory[-FENCE:].isnan().all())


def batch_of(counts: list[int], starts: list[int]) -> tuple[Places, int]:
    """Rows of several sequences, whose blocks lie anywhere; what is not used of a table points nowhere."""
    width = max(-(-(start + count) // 16) for start, count in zip(starts, counts, strict=True)) + 1
    tables = np.random.default_rng(0).permutation(width * len(counts)).reshape(len(counts), width).astype(np.int32)
    for row, start, count in zip(tables, starts, counts, strict=True):
        row[-(-(start + count) // 16) :] = 1 << 20
    batch = Batch(
        tokens=np.zeros(sum(counts), np.int32),
        positions=np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32),
        sequences=np.repeat(np.arange(len(counts)), counts).astype(np.int32),
        tables=tables,
        logit_rows=np.empty(0, np.int32),
    )
    runs = runs_of(batch)
    singles = np.concatenate([np.arange(run.first, run.first + run.count) for run in runs if run.count <= 8])
    out = np.zeros(most_numbers(len(batch.tokens), tables.size), np.int32)
    num_singles, count = packed(batch, 16, len(batch.tokens), 0, singles.astype(np.int32), out)
    long_runs = tuple(run for run in runs if run.count > 8)
    return unpacked(torch.from_numpy(out[:count]), len(batch.tokens), num_singles, long_runs), width * len(counts)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(8, 1, 64), (4, 1, 128), (2, 2, 16)], ids=["8:1", "4:1", "1:1"]
)
def test_attention_of_all_shapes(num_heads: int, num_kv_heads: int, head_size: int, window: int | None) -> None:
    """Ragged sequences: a first token, ends at and after a block's, two rows of one, a piece of a prompt."""
    places, num_blocks = batch_of([1, 1, 1, 2, 17], [0, 15, 16, 97, 33])
    generator = torch.Generator().manual_seed(0)
    q_width, kv_width = num_heads * head_size, num_kv_heads * head_size
    qkv = torch.randn(22, q_width + 2 * kv_width, generator=generator)
    keys, values = (fenced(torch.full((num_blocks, num_kv_heads, 16, head_size), torch.nan)) for _ in range(2))
    for cache in (keys, values):  # what was computed before; the rest was never written
        for row, (start, table) in enumerate(zip([0, 15, 16, 97, 33], np.array(read_table(places)), strict=True)):
            for at in range(start):
                cache[table[at // 16], :, at % 16] = torch.randn(num_kv_heads, head_size, generator=generator) + row
    span = Span("qkv", 0, q_width)
    attend = Attend(
        dst=Span("attended", 0, q_width),
        q=span,
        k=Span("qkv", q_width, kv_width),
        v=Span("qkv", q_width + kv_width, kv_width),
        layer=0,
        head_size=head_size,
        window=window,
        scale=head_size**-0.5,
    )
    turns = torch.randn(128, 2, head_size // 2, generator=generator)
    step = Attention(attend=attend, turns=turns)
    found = []
    for kernels in (PlainKernels(), TritonKernels(TUNING)):
        mine, held = qkv.clone(), [fenced(cache) for cache in (keys, values)]
        kernels.rotate_and_store(step, mine, places, *held)
        assert all(map(is_fence_whole, held))
        # The definition looks at whole tables.
        if isinstance(kernels, TritonKernels):
            found.append((kernels.attend(step, mine, places, *held), *held))
        else:
            tables = places.tables.clone()
            places.tables[places.tables == 1 << 20] = 0
            found.append((kernels.attend(step, mine, places, *(cache.nan_to_num() for cache in held)), *held))
            places.tables.copy_(tables)
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert not found[1][0].isnan().any()


def read_table(places: Places) -> list[list[int]]:
    return places.table().tolist()


def test_greedy_answers_through_the_engine() -> None:
    answers = []
    for tuning in (None, TUNING):
        engine = LocalEngine(
            runner("llama", tuning, num_blocks=16),
            SHAPES["llama"],
            EngineConfig(max_step_tokens=20, max_running=4),
            max_context=128,
        )
        client = Client(engine)
        prompts = [list(range(1, length)) for length in (3, 12)]
        started = [client.start(client.request(prompt, max_tokens=3)) for prompt in prompts]
        answers.append([client.wait(events).tokens for events in started])
        engine.close()
    assert answers[0] == answers[1]


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    """A whole text at once, and in pieces of all kinds beside a stranger's."""
    name = "llama"
    tile = Tile(num_outputs=16, num_inputs=32, num_warps=4, num_stages=2)
    found = []
    for pieces, num_strange in (([20], 0), ([11, 8, 1], 3)):
        gpu = runner(name, None)
        gpu._kernels = InvariantKernels(40, TUNING, tile, num_rows=16)
        logits, start = [], 0
        for length in pieces:
            stop = start + length
            batch = Batch(
                tokens=np.concatenate([TOKENS[40 : 40 + num_strange], TOKENS[start:stop]]),
                positions=np.concatenate([np.arange(num_strange), np.arange(start, stop)]).astype(np.int32),
                sequences=np.array([0] * num_strange + [min(num_strange, 1)] * length, np.int32),
                tables=np.array([[6, 1], [5, 2]] if num_strange else [[5, 2]], np.int32),
                logit_rows=np.arange(num_strange, num_strange + length).astype(np.int32),
            )
            logits.append(gpu.run(batch).copy())
            start = stop
        found.append(np.concatenate(logits))
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], feed(runner(name, None), [45])[:20], atol=2e-4, rtol=1e-4)


def test_tiles_cover_each_row_once() -> None:
    runs = (Run(first=3, count=37, start=5, sequence=1), Run(first=40, count=16, start=0, sequence=0))
    tiles = tiles_of(runs, 16)
    rows = {row + i: (position + i, sequence) for row, n, position, sequence in tiles.tolist() for i in range(n)}
    assert len(rows) == sum(n for _, n, _, _ in tiles.tolist()) == 53
    assert rows == {run.first + i: (run.start + i, run.sequence) for run in runs for i in range(run.count)}


def test_heads_that_the_kernels_do_not_take_run_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openwafer.serve.gpu.fast.find_spec", lambda name: object())
    assert isinstance(best_kernels(tiny_program(CONFIGS["llama"])), TritonKernels)
    assert type(best_kernels(tiny_program(CONFIGS["odd"]))) is PlainKernels
    assert "size 10" in caplog.text
    with pytest.raises(UserError, match="batch_invariant"):
        best_kernels(tiny_program(CONFIGS["odd"]), batch_invariant=True)
    assert isinstance(best_kernels(tiny_program(CONFIGS["llama"]), batch_invariant=True), InvariantKernels)
    monkeypatch.setattr("openwafer.serve.gpu.fast.find_spec", lambda name: None)
    assert type(best_kernels(tiny_program(CONFIGS["llama"]))) is PlainKernels
