"""Stages in a row of which the first is a process of this host and the others are ranks, here or elsewhere.

The first has a process of its own so that its computing does not wait for the HTTP server's Python. Batches go to it
over a pipe as on one host, and from there straight from stage to stage; results come from the last stage to us. So
nothing is passed on by a process that does not compute with it.
"""

import threading
import time
from collections.abc import Sequence

from openwafer.errors import UserError
from openwafer.serve.pipeline.cluster import Cluster
from openwafer.serve.pipeline.pipe import Inbox, Pipe
from openwafer.serve.pipeline.processes import StageLost, StageProcesses
from openwafer.serve.pipeline.spec import StageSpec

_DIE_S = 5.0  # until it is known who is gone


class StageRanks:
    """One for each spec."""

    def __init__(self, cluster: Cluster, specs: Sequence[StageSpec]) -> None:
        self._cluster = cluster
        self._is_ended = False
        self.last: Inbox = cluster.open(specs)
        self._own = StageProcesses(specs[:1], link=cluster.members.link("stage-2"))
        self.first: Pipe = self._own.first
        threading.Thread(target=self._watch_own, name="openwafer-watch", daemon=True).start()
        try:
            cluster.await_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the stages in processes of ours."""
        return self._own.process_ids

    def _watch_own(self) -> None:
        """Whichever stage fails first is heard at once, this one too."""
        try:
            self._own.await_ready()
            self._cluster.own_is_ready()
            self._own.wait_for_word()
            error: UserError = self._own.lost()
        except UserError as failed:
            error = failed
        if not self._is_ended:
            self._cluster.fail(error)

    def check(self) -> None:
        if self._cluster.failure is not None:
            raise self._cluster.failure

    def lost(self) -> StageLost:
        if self._is_ended:
            return StageLost("the stages did not finish their step in time and were ended")
        deadline = time.monotonic() + _DIE_S
        while self._cluster.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._cluster.failure or StageLost("a stage of the pipeline closed its connection")

    def kill(self) -> None:
        self._is_ended = True
        self._cluster.release()
        self._own.kill()
        self.last.end()

    def close(self) -> None:
        self._is_ended = True
        self._own.close()
        self._cluster.release()
