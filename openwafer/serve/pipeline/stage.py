"""One stage of a pipeline, in a process of its own: `python -m openwafer.serve.pipeline.stage CONTROL IN OUT`.

CONTROL and IN are descriptors of sockets: to the engine's process, and from the stage before. OUT is a third one, to
the stage after, or the name of a link to it if that is on another host. The stage lives as long as the first of them:
when the engine's process is gone, so is the stage. Stages on other hosts are in `rank.py`.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from openwafer.errors import UserError
from openwafer.serve.pipeline.message import Work, encoded_result
from openwafer.serve.pipeline.pipe import Broken, Inbox, Pipe, Sender
from openwafer.serve.pipeline.spec import StageSpec
from openwafer.serve.runner import Draw, DrawingStageRunner, Drawn, StageRunner
from openwafer.serve.sampler import draw_plain
from openwafer.serve.stage_plan import StagePlan

NO_MEMORY = "there is not enough memory for its layers: give --dram a number that fits"


def main() -> None:
    # Ctrl-C and SIGTERM are for the engine's process, which lets answers finish and then lets us go.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control, inbound = (Pipe(socket.socket(fileno=int(number))) for number in sys.argv[1:3])
    spec = StageSpec.decoded(control.receive())
    threading.Thread(target=_watch, args=(control,), daemon=True).start()
    try:
        outbound = _outbound(sys.argv[3])
        runner = open_region(spec)
        control.send([b"ready"])
        inbox = Inbox(inbound)
        try:
            run_batches(runner, inbox, outbound, is_last=spec.is_last)
        except Broken:
            if isinstance(outbound, Pipe):
                raise  # and by ending tell the stage before
            while inbox.get() is not None:
                pass  # the engine hears from the other host, or that it is gone, and lets us go
        runner.close()
    except Broken:
        pass
    except UserError as error:
        control.send([f"error {error}".encode()])
        os._exit(1)
    except MemoryError:
        control.send([b"error " + NO_MEMORY.encode()])
        os._exit(1)
    os._exit(0)  # at once: threads that read must not hold the process


def _outbound(name: str) -> Sender:
    if name.isdigit():
        return Pipe(socket.socket(fileno=int(name)))
    from openwafer.serve.pipeline.link import Link

    link = Link(name, side=0)
    link.join()
    return link


def _watch(control: Pipe) -> None:
    """The engine's process says nothing more; that it is gone is heard here, whatever the stage is doing."""
    try:
        control.receive()
    except Broken:
        os._exit(1)


def open_region(spec: StageSpec) -> StageRunner:
    """What the spec says, loaded."""
    import torch

    from openwafer.models.load import open_model
    from openwafer.serve.opening import open_stage

    stored = open_model(spec.model)
    folder = None if spec.config.flash is None else spec.config.flash / f"stage-{spec.index}"
    torch.set_num_threads(spec.plan.num_threads)
    if isinstance(spec.plan, StagePlan):
        return open_stage(stored, spec.config, spec.plan, folder)
    from openwafer.serve.gpu.opening import open_on_gpu

    return open_on_gpu(stored, spec.config, spec.plan, folder=folder)


def run_batches(runner: StageRunner, inbox: Inbox, outbound: Sender, *, is_last: bool) -> None:
    """Until no more come."""
    busy_s = 0.0
    draws_itself = isinstance(runner, DrawingStageRunner)
    while (message := inbox.get()) is not None:
        work = Work.decoded(message)
        began = time.perf_counter()
        if not is_last:
            x = runner.run_stage(work.batch, work.x)
            busy_s += time.perf_counter() - began
            outbound.send(Work(batch=work.batch, draws=work.draws, x=x, busy_s=(*work.busy_s, busy_s)).encoded())
            continue
        if draws_itself:
            drawn = runner.draw_stage(work.batch, work.x, work.draws)
        else:
            drawn = _drawn(runner.run_stage(work.batch, work.x), work.draws)
        busy_s += time.perf_counter() - began
        outbound.send(encoded_result(drawn, (*work.busy_s, busy_s)))


def _drawn(logits: np.ndarray, draws: Sequence[Draw | None]) -> Drawn:
    """Tokens where the request asks for nothing special: a row of logits need not cross then."""
    tokens, tops = np.zeros(len(draws), np.int32), np.zeros(len(draws), np.float32)
    for row, how in enumerate(draws):
        if how is not None:
            tokens[row], tops[row] = draw_plain(logits[row], how)
    return Drawn(tokens=tokens, tops=tops, logits=logits[[row for row, how in enumerate(draws) if how is None]])


if __name__ == "__main__":
    main()
