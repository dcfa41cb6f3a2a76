"""Ctrl-C ends a simulation that would go on for ever, in a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path

ENDLESS = """
from openwafer.fabric import Layout, Rect, Simulation
from openwafer.systems import WSE2

def program(pe):
    x = pe.array("x", 4)
    with pe.task("again", start=True):
        pe.mov(x, x)
        pe.activate("again")

layout = Layout(WSE2, width=1, height=1)
layout.place(program, Rect(0, 0))
Simulation(layout).run(progress=lambda cycle: print(cycle, flush=True))
"""


def test_an_endless_program_can_be_interrupted() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            cycles = [int(process.stdout.readline()) for _ in range(20)]  # it is at work, and tells how far it is
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert cycles == sorted(set(cycles))
    assert said.rstrip().endswith("KeyboardInterrupt")
