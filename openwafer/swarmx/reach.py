"""Whether a host can be reached: the difference between a link that loses packets and a rank that hangs."""

import socket
import time

_NUM_TRIES = 5  # of a link that loses half its packets each way, one in four answers without being asked again


def is_reached(address: str, port: int, within_s: float) -> bool:
    """Whether the host answers several connections in that time. Its kernel answers, so a busy host does too."""
    deadline = time.monotonic() + within_s
    for _ in range(_NUM_TRIES):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        try:
            socket.create_connection((address, port), timeout=left_s).close()
        except ConnectionRefusedError:
            continue  # nobody listens, but the host said so
        except OSError:
            return False
    return time.monotonic() <= deadline
