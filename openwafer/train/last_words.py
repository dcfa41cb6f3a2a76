"""A rank that its launcher ends because another one died is given the time to find out which, and to say it."""

import os
import signal
import socket
import threading
import time

GRACE_S = 3.0  # a connection whose other end died breaks well within it; launchers wait 30 s before they kill


def stay_after_sigterm(grace_s: float = GRACE_S) -> None:
    """From now on SIGTERM ends this process `grace_s` later, unless it ends by itself.

    The launcher sees that a process of its host died within a tenth of a second and ends its other ranks: without
    this, often before they have seen it. The main thread may be waiting for another rank where Python runs no signal
    handlers, so a thread is woken.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)

    def end() -> None:
        while woken.recv(1) != bytes([signal.SIGTERM]):
            pass  # another signal that has a handler
        time.sleep(grace_s)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
    threading.Thread(target=end, name="openwafer-last-words", daemon=True).start()
