"""Pipelines whose stages are threads: real stages and real pipes, without the time that processes take to start."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest

from openwafer.models.config import ModelConfig
from openwafer.serve.engine import LocalEngine
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.loading import load_program
from openwafer.serve.native import NativeRunner
from openwafer.serve.pipeline.pipe import Broken, Inbox, Pipe
from openwafer.serve.pipeline.processes import StageLost
from openwafer.serve.pipeline.runner import PipelineRunner
from openwafer.serve.pipeline.stage import run_batches
from openwafer.serve.region import split
from openwafer.serve.runner import StageRunner
from openwafer.serve.speculation import Speculator
from tests.serve.conftest import Client, stored, tiny_module


class ThreadStages:
    def __init__(self, runners: Sequence[StageRunner]) -> None:
        self._runners = runners
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        ours, upstream = self._pair()
        self.first = Pipe(ours)
        for index, runner in enumerate(runners):
            downstream, following = self._pair()
            is_last = index == len(runners) - 1
            thread = threading.Thread(target=self._run, args=(runner, upstream, downstream, is_last))
            thread.start()
            self._threads.append(thread)
            upstream = following
        self.last = Pipe(upstream)

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        self._ends += pair
        return pair

    def _run(self, runner: StageRunner, upstream: socket.socket, downstream: socket.socket, is_last: bool) -> None:
        with contextlib.suppress(Broken):
            run_batches(runner, Inbox(Pipe(upstream)), Pipe(downstream), is_last=is_last)
        downstream.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        if not all(thread.is_alive() for thread in self._threads):
            raise self.lost()

    def lost(self) -> StageLost:
        return StageLost("a stage is gone")

    def kill(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)

    def cut(self, index: int) -> None:
        """Break the connection into a stage."""
        self._ends[2 * index].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.first._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for runner in self._runners:
            runner.close()
        for end in self._ends:
            end.close()


class OpenPipeline(Protocol):
    def __call__(
        self,
        config: ModelConfig,
        num_stages: int,
        *,
        num_blocks: int = 64,
        speculator: Speculator | None = None,
        **engine: object,
    ) -> Client: ...


@pytest.fixture
def open_pipeline() -> Iterator[OpenPipeline]:
    """`open_pipeline(config, num_stages, num_blocks=..., **engine options)`: a client of an engine on stages."""
    opened: list[LocalEngine] = []

    def open_(
        config: ModelConfig,
        num_stages: int,
        *,
        num_blocks: int = 64,
        speculator: Speculator | None = None,
        **engine: object,
    ) -> Client:
        chosen = EngineConfig(**{"num_threads": 1, "max_step_tokens": 32} | engine)  # pyright: ignore
        model = stored(tiny_module(config))
        whole = load_program(model, chosen)
        runners = [
            NativeRunner(
                load_program(model, chosen, region),
                num_blocks=num_blocks,
                max_rows=chosen.num_step_tokens,
                half_cache=whole.is_packed,
                num_threads=1,
            )
            for region in split([1.0] * config.num_hidden_layers, 1.0, num_stages)
        ]
        runner = PipelineRunner(ThreadStages(runners), num_stages=num_stages, num_blocks=num_blocks)
        context = min(config.max_position_embeddings, num_blocks * runner.block_size)
        opened.append(LocalEngine(runner, config, chosen, max_context=context, speculator=speculator))
        return Client(opened[-1])

    yield open_
    for engine in opened:
        engine.close()
