"""Traces for Perfetto and chrome://tracing: one track per PE thread, one cycle shown as one microsecond."""

import numpy as np

from openwafer.chrome_trace import Event, document, process_event, slice_event
from openwafer.fabric.engine import EngineMachine

FIRST_THREAD = 100  # span kinds from here on are threads of the core, below are tasks


def trace(machine: EngineMachine) -> str:
    """The run as trace-event JSON; needs a machine that ran with `trace=True`."""
    layout = machine.layout
    programs = [[task.name for task in program.tasks] for program in layout.programs]
    events: list[Event] = []
    named: set[int] = set()
    for pe, kind, start, end in machine.spans.tolist():
        if pe not in named:
            named.add(pe)
            events.append(process_event(pe, f"PE ({pe % layout.width}, {pe // layout.width})"))
        is_task = kind < FIRST_THREAD
        name = programs[machine.image.program_of[pe]][kind] if is_task else f"fabric thread {kind - FIRST_THREAD}"
        track = 0 if is_task else 1 + kind - FIRST_THREAD
        events.append(slice_event(pe, track, name, start, end - start))
    return document(events)


def busy_share(machine: EngineMachine, cycles: int) -> np.ndarray:
    """[height, width]: share of cycles in which each PE's main thread worked or moved a word."""
    return machine.busy.reshape(machine.layout.height, machine.layout.width) / max(1, cycles)
