"""A process that is asked to end still says what it finds out shortly after."""

import signal
import subprocess
import sys

SCRIPT = """
import threading, time
from openwafer.train.last_words import stay_after_sigterm
stay_after_sigterm({grace_s})
def speak():
    input()
    time.sleep(0.3)
    print("who was lost", flush=True)
threading.Thread(target=speak, daemon=True).start()
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()  # for ever, as in a wait for another rank
"""


def asked_to_end(grace_s: float) -> tuple[str, int]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SCRIPT.format(grace_s=grace_s)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate("\n", timeout=60)
        return said, process.returncode


def test_what_is_found_out_within_the_time_is_said() -> None:
    assert asked_to_end(grace_s=2) == ("who was lost\n", 128 + signal.SIGTERM)


def test_it_ends_when_the_time_is_over() -> None:
    said, status = asked_to_end(grace_s=0)
    assert (said, status) == ("", 128 + signal.SIGTERM)
