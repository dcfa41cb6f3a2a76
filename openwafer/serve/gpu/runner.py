"""A program on one GPU: weights and cache stay there, one copy of small numbers goes in, tokens come out.

Steps of few rows per sequence (decoding) are recorded once per number of rows as CUDA graphs and replayed, because
launching their 230 kernels one by one takes longer than running them. Steps with pieces of prompts run as they are.
"""

import bisect
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from openwafer.errors import UserError
from openwafer.serve.gpu.compute import STREAM, Values, run_steps
from openwafer.serve.gpu.drawing import draw_rows
from openwafer.serve.gpu.graphs import Recorded, record
from openwafer.serve.gpu.landing import Landing
from openwafer.serve.gpu.layer_stream import LayerStream
from openwafer.serve.gpu.places import SHORT, Places, most_numbers, packed, runs_of, unpacked
from openwafer.serve.gpu.plain import Kernels, PlainKernels
from openwafer.serve.gpu.plan import Plan, Streamed, make_plan
from openwafer.serve.gpu.sending import sent
from openwafer.serve.program import Embed, Program, Span
from openwafer.serve.runner import Batch, Draw, Drawn

BLOCK_SIZE = 16
# Rows of the recorded graphs; a batch takes the next larger one.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class GpuRunner:
    """Runs a program with torch on any device; with graphs and Triton kernels on a GPU."""

    block_size = BLOCK_SIZE

    def __init__(
        self,
        program: Program,
        *,
        num_blocks: int,
        max_rows: int,
        max_sequences: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        kernels: Kernels | None = None,
        graph_sizes: Sequence[int] = SIZES,
        plan: Plan | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        """`kernels` None: the plain ones; `graph_sizes`: none of them are recorded where the device has no graphs, or
        where layers are streamed. `plan`: that of the program, made while it was loaded. `stream`: closed with this."""
        config = program.config
        self.num_blocks = num_blocks
        self._device = device
        self._dtype = dtype
        self._widths = program.widths
        self._kernels = kernels or PlainKernels()
        self._max_rows = max_rows
        max_positions = min(config.max_position_embeddings, num_blocks * BLOCK_SIZE)
        self._stream = stream
        self._plan = plan or make_plan(program, device, dtype, max_positions)
        # One block more than is lent out: rows that fill up a graph are stored there.
        shape = (program.num_layers, 2, num_blocks + 1, config.kv_heads, BLOCK_SIZE, config.head_size)
        self._cache = torch.zeros(shape, dtype=dtype, device=device)
        self._spare_slot = num_blocks * BLOCK_SIZE
        # A graph would have to wait for copies in its middle, and a step that copies gigabytes has time for launches.
        self.num_streamed_bytes = sum(step.source.num_bytes for step in self._plan.body if isinstance(step, Streamed))
        records = device.type == "cuda" and self._kernels.records and not self.num_streamed_bytes
        sizes = [size for size in sorted(set(graph_sizes)) if size < 2 * max_sequences] if records else []
        rows = max(max_rows, *sizes, 1)
        count = most_numbers(rows, max_sequences * (-(-max_positions // BLOCK_SIZE) + 1))
        # What comes from the stage before; steps add to it in place.
        self._inflow: torch.Tensor | None = None
        if not isinstance(program.body[0], Embed):
            self._inflow = torch.zeros(rows, config.hidden_size, device=device)
        self._staging = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._staged = torch.zeros(count, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)  # that the last batch drew
        self._launched: deque[Landing] = deque()
        self._graphs: dict[int, Recorded] = {}
        pool = torch.cuda.graph_pool_handle() if sizes else None
        with torch.inference_mode():
            for size in reversed(sizes):  # the largest first: the others fit into its memory
                self._graphs[size] = self._recorded(size, pool)
        self._sizes = sizes

    def run(self, batch: Batch) -> np.ndarray:
        return self.run_stage(batch, None)

    def run_stage(self, batch: Batch, x: np.ndarray | None) -> np.ndarray:
        with torch.inference_mode(), _memory_for(batch):
            found, _ = self._compute(batch, x)
            return found.cpu().numpy()

    def run_and_draw(self, batch: Batch, draws: Sequence[Draw | None]) -> Drawn:
        self.launch(batch, draws)
        return self.land()

    def draw_stage(self, batch: Batch, x: np.ndarray | None, draws: Sequence[Draw | None]) -> Drawn:
        self.launch(batch, draws, x)
        return self.land()

    def launch(self, batch: Batch, draws: Sequence[Draw | None], x: np.ndarray | None = None) -> None:
        assert len(draws) == len(batch.logit_rows)
        with torch.inference_mode(), _memory_for(batch):
            logits, picked = self._compute(batch, x)
            chosen = [row for row, draw in enumerate(draws) if draw is not None and draw.temperature > 0]
            if chosen:
                rows = sent(np.array(chosen), self._device)
                tokens = draw_rows(logits[rows], [draw for row in chosen if (draw := draws[row]) is not None])
                picked = picked.clone()
                picked[0, rows] = tokens.int()
            self._tokens[: len(draws)] = picked[0]
            # Rows that the host looks at are sent now: the next batch overwrites them.
            shown = [row for row, draw in enumerate(draws) if draw is None]
            seen = logits[sent(np.array(shown), self._device)] if shown else logits[:0]
            self._launched.append(Landing.begun(picked, seen))

    def land(self) -> Drawn:
        return self._launched.popleft().drawn()

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a batch may be under way
        self._graphs.clear()
        if self._stream is not None:
            self._stream.close()

    def _compute(self, batch: Batch, x: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 logits of the wanted rows [n, vocab], and int32 [2, n]: their largest one's id, and its bits.

        Without a head: the residual stream of all rows, and nothing.
        """
        num_rows = len(batch.tokens)
        assert 0 < num_rows <= self._max_rows
        if self._inflow is not None:
            assert x is not None
            self._inflow[:num_rows] = sent(x, self._device)
        runs = runs_of(batch)
        is_short = all(run.count <= SHORT for run in runs)
        if is_short and self._sizes and num_rows <= self._sizes[-1]:
            size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
            self._stage(batch, size, np.arange(size, dtype=np.int32))
            if self._inflow is not None:
                self._inflow[num_rows:size] = 0  # or rows that nobody looks at would grow from step to step
            logits, picked = self._graphs[size].replay()
            wanted = batch.logit_rows
            if len(wanted) == num_rows or not self._plan.head:
                return logits[:num_rows], picked[:, :num_rows]
            index = sent(wanted, self._device)
            return logits[index], picked[:, index]
        singles = [np.arange(run.first, run.first + run.count) for run in runs if run.count <= SHORT]
        single_rows = np.concatenate(singles).astype(np.int32) if singles else np.empty(0, np.int32)
        num_singles = self._stage(batch, num_rows, single_rows)
        long_runs = tuple(run for run in runs if run.count > SHORT)
        places = unpacked(self._staged, num_rows, num_singles, long_runs)
        return self._forward(places, sent(batch.logit_rows, self._device))

    def _stage(self, batch: Batch, num_rows: int, singles: np.ndarray) -> int:
        """Send a batch's numbers in one copy."""
        if self._sent is not None:
            self._sent.synchronize()  # a step without logits ends before its copy was made
        num_singles, count = packed(batch, BLOCK_SIZE, num_rows, self._spare_slot, singles, self._staging.numpy())
        self._staged[:count].copy_(self._staging[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return num_singles

    def _forward(self, places: Places, logit_rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        places = replace(places, tokens=torch.where(places.follows < 0, places.tokens, self._tokens[places.follows]))
        values = Values(self._widths, self._dtype)
        if self._inflow is not None:
            values.replace(STREAM, self._inflow[: len(places.tokens)])
        run_steps(self._plan.body, self._kernels, values, places, self._cache)
        nothing = torch.empty(2, 0, dtype=torch.int32, device=self._device)
        if not self._plan.head:
            return values.read(Span(STREAM, 0, self._widths[STREAM])), nothing
        if logit_rows is not None:
            if not len(logit_rows):  # pieces of prompts only
                return torch.empty(0, self._widths["logits"], device=self._device), nothing
            values.keep_rows(logit_rows)
        logits = run_steps(self._plan.head, self._kernels, values, places, self._cache).float()
        tops, ids = logits.max(dim=1)
        return logits, torch.stack([ids.int(), tops.view(torch.int32)])

    def _recorded(self, size: int, pool: Any) -> Recorded:
        batch = Batch(
            tokens=np.zeros(1, np.int32),
            positions=np.zeros(1, np.int32),
            sequences=np.zeros(1, np.int32),
            tables=np.zeros((1, 1), np.int32),
            logit_rows=np.zeros(1, np.int32),
        )
        self._stage(batch, size, np.arange(size, dtype=np.int32))
        places = unpacked(self._staged, size, size)
        return record(lambda: self._forward(places, None), pool)


@contextlib.contextmanager
def _memory_for(batch: Batch) -> Iterator[None]:
    """To compute and to draw a batch: what to do if there is too little, for whoever started the server."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the GPU has not enough memory for a step of {len(batch.tokens)} tokens "
            f"({str(error).splitlines()[0]}): give a smaller --device_memory, --kv_cache or --max_step_tokens"
        ) from None
