"""Ctrl-C during the imports of the command: status 130, one line, no traceback."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openwafer.interrupt import LeaveAtOnce

# One import takes long, and swallows what Python's own machinery may swallow.
SLOW_IMPORT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow:
    def find_spec(self, name, path, target=None):
        if name == SLOW:
            print("importing", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Slow())
from openwafer.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("slow", ["openwafer.config", "openwafer.fabric.kernels.catalog"])
def test_ctrl_c_ends_an_import(slow: str) -> None:
    command = [sys.executable, "-c", SLOW_IMPORT.replace("SLOW", repr(slow)), "simulate", "reduce"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "openwafer: interrupted\n")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_afterwards_ctrl_c_does_what_it_did(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with LeaveAtOnce():
            inside = signal.getsignal(signal.SIGINT)
        assert (inside is handler) == (handler is signal.SIG_IGN)  # as in the background of a shell
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_ctrl_c_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with LeaveAtOnce():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
