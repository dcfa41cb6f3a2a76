"""A rank after the first: one stage of a pipeline, for the engine of rank 0, until that lets it go or is gone."""

import dataclasses
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from openwafer.errors import UserError
from openwafer.models.load import open_model
from openwafer.serve.engine_config import EngineConfig
from openwafer.serve.pipeline.cluster import LEAVE, OPEN, READY, STOP, channel_to, end_at_once
from openwafer.serve.pipeline.link import Link
from openwafer.serve.pipeline.members import Members
from openwafer.serve.pipeline.pipe import Broken, Inbox
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.serve.pipeline.stage import NO_MEMORY, open_region, run_batches
from openwafer.swarmx.channel import FAILED, Mailbox
from openwafer.swarmx.message import Message

_LEAVE_S = 5.0  # a step has to end when the stage is not needed any more


def serve_stage(members: Members, model: str, config: EngineConfig) -> NoReturn:
    """Ends the process. `model` and the `flash` of `config` are those of this host."""
    _StageRank(members).run(model, config.flash)


class _StageRank:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._name = members.names[members.rank]
        self._inbox: Inbox | None = None
        self._is_running = False
        self._is_over = threading.Event()
        self._status = 1
        # A queue, because another signal may come while one is handled: an Event would wait for its own lock.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self._signals.put(received))
        self._mailbox = Mailbox()
        self._channel = channel_to(members, 0, self._mailbox)
        for target in (self._obey, self._ask):
            threading.Thread(target=target, name=f"openwafer-{target.__name__}", daemon=True).start()

    def run(self, model: str, flash: Path | None) -> NoReturn:
        try:
            self._serve(model, flash)
        except Broken:
            pass  # a neighbour is gone; rank 0 says which
        except UserError as error:
            if error is not self._mailbox.lost:
                self._fail(str(error))
        except MemoryError:
            self._fail(NO_MEMORY)
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to end
            traceback.print_exc()
            self._fail(f"{type(error).__name__} {error}")
        self._is_over.wait()
        end_at_once(self._status)

    def _serve(self, model: str, flash: Path | None) -> None:
        spec = StageSpec.decoded(self._mailbox.get(0, OPEN).fields["spec"].encode())
        config = dataclasses.replace(spec.config, flash=flash)
        spec = dataclasses.replace(spec, model=open_model(model).path, config=config)
        layers = spec.plan.region.layers
        print(
            f"{self._name}: layers {layers[0]}..{layers[-1]} of {model}, for the server of {self._members.names[0]}",
            file=sys.stderr,
            flush=True,
        )
        self._inbox = Inbox(Link(self._link(spec.index), side=1))
        outbound = Link(self._link(spec.index + 1), side=0)
        outbound.join()
        runner = open_region(spec)
        self._channel.send(Message(READY))
        self._is_running = True
        run_batches(runner, self._inbox, outbound, is_last=spec.is_last)
        self._is_over.wait()
        runner.close()

    def _link(self, index: int) -> str:
        """Into stage `index`, counted from 0."""
        is_result = index == len(self._members.names)
        return self._members.link("results" if is_result else f"stage-{index + 1}")

    def _fail(self, why: str) -> None:
        """All ranks are told, this one too."""
        self._channel.send(Message(FAILED, {"error": f"{self._name}: {why}"}))

    def _obey(self) -> None:
        """Until rank 0 says that it is over, or is gone."""
        try:
            self._mailbox.get(0, STOP)
            self._status = 0
        except UserError as error:
            print(f"openwafer: {self._name} ends: {error}", file=sys.stderr, flush=True)
        self._channel.stop()
        self._is_over.set()
        if self._inbox is not None and self._is_running:
            self._inbox.end()
            time.sleep(_LEAVE_S)
        end_at_once(self._status)

    def _ask(self) -> None:
        """Who is told to end while others serve asks rank 0 to end all: it lets answers finish first."""
        self._signals.get()
        self._channel.send(Message(LEAVE))
