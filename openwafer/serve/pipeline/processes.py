"""The processes of a pipeline: started, heard, and ended with the engine."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from openwafer.errors import UserError
from openwafer.serve.pipeline.pipe import Broken, Pipe
from openwafer.serve.pipeline.spec import StageSpec

_LEAVE_S = 5.0  # a stage has to go when it is not needed any more
_DIE_S = 2.0  # for the others to follow one that died


class StageLost(UserError):
    """A stage died, so the engine cannot go on."""


class StageProcesses:
    """One process for each spec, in a row. `first` takes batches, `last` gives results."""

    # What Python is told to run; a test has another. -P: modules in the folder where the user stands are not ours.
    program: ClassVar[tuple[str, ...]] = ("-P", "-m", "openwafer.serve.pipeline.stage")

    def __init__(self, specs: Sequence[StageSpec], link: str | None = None) -> None:
        """`link`: the last process sends to another host over it. Then there is no `last`, and nobody waits yet."""
        self._specs = specs
        self._link = link
        self._is_ended = False  # by us
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Pipe] = []
        ours, upstream = socket.socketpair()
        self.first = Pipe(ours)
        try:
            for spec in specs if link is None else specs[:-1]:
                downstream, next_upstream = socket.socketpair()
                self._start(spec, upstream, downstream)
                upstream = next_upstream
            if link is None:
                self.last = Pipe(upstream)
                self.await_ready()
            else:
                self._start(specs[-1], upstream, link)
        except BaseException:
            self.kill()
            self.first.close()
            upstream.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, spec: StageSpec, upstream: socket.socket, downstream: socket.socket | str) -> None:
        control, theirs = socket.socketpair()
        ends = [theirs, upstream]
        if isinstance(downstream, socket.socket):
            ends.append(downstream)
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.plan.num_threads)}
        numbers = [end.fileno() for end in ends]
        link = [downstream] if isinstance(downstream, str) else []
        process = subprocess.Popen(
            [sys.executable, *self.program, *map(str, numbers), *link],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        self._processes.append(process)
        for end in ends:
            end.close()
        self._controls.append(Pipe(control))
        self._controls[-1].send([spec.encoded()])

    def await_ready(self) -> None:
        """Until every stage has loaded its layers; the first that fails says why."""
        with selectors.DefaultSelector() as selector:
            for index, control in enumerate(self._controls):
                selector.register(control, selectors.EVENT_READ, index)
            waiting = len(self._controls)
            while waiting:
                for key, _ in selector.select():
                    self._expect_ready(key.data)
                    selector.unregister(self._controls[key.data])
                    waiting -= 1

    def _expect_ready(self, index: int) -> None:
        try:
            said = bytes(self._controls[index].receive()).decode()
        except Broken:
            raise self._lost(index, " while it loaded its layers") from None
        if said != "ready":
            raise UserError(f"{self._specs[index].name}: {said.removeprefix('error ')}")

    def wait_for_word(self) -> None:
        """Until a stage says something, or has ended: after its start it says only why it fails."""
        with selectors.DefaultSelector() as selector:
            for control in self._controls:
                selector.register(control, selectors.EVENT_READ)
            selector.select()

    def check(self) -> None:
        """Raise if a stage has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise self.lost()

    def lost(self) -> StageLost:
        """What to say when a stage was found gone: the one that went first, and why if it said so."""
        if self._is_ended:
            return StageLost("the stages did not finish their step in time and were ended")
        deadline = time.monotonic() + _DIE_S
        while time.monotonic() < deadline:
            for index, process in enumerate(self._processes):
                if process.poll() not in (None, 0):
                    return self._lost(index)
            time.sleep(0.01)
        ended = [index for index, process in enumerate(self._processes) if process.poll() is not None]
        return self._lost(ended[0]) if ended else StageLost("a stage of the pipeline closed its connection")

    def _lost(self, index: int, when: str = "") -> StageLost:
        process = self._processes[index]
        name = f"{self._specs[index].name} (process {process.pid})"
        try:
            said = bytes(self._controls[index].receive()).decode()
            return StageLost(f"{name} failed: {said.removeprefix('error ')}")
        except Broken:
            pass
        try:
            code = process.wait(_DIE_S)
        except subprocess.TimeoutExpired:
            return StageLost(f"{name} closed its connection{when}")
        if code >= 0:
            return StageLost(f"{name} ended with code {code}{when}")
        signal_name = signal.Signals(-code).name
        fix = ": was there not enough memory? Give --dram less" if signal_name == "SIGKILL" else ""
        return StageLost(f"{name} was ended by {signal_name}{when}{fix}")

    def close(self) -> None:
        """Let the stages go, one after the other; those that do not are killed."""
        self.first.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()
        if self._link is None:
            self.last.close()

    def kill(self) -> None:
        self._is_ended = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for control in self._controls:
            control.close()
