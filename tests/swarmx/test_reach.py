"""Reaching a host: one that answers, one that refuses, one whose answers do not come."""

import contextlib
import socket

from openwafer.swarmx.reach import is_reached


def test_a_host_that_answers_or_refuses_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_reached("127.0.0.1", port, 5)
    assert is_reached("127.0.0.1", port, 5), "refused at once"


def test_a_host_that_does_not_answer_is_not() -> None:
    """A queue of connections that is full: the kernel drops further packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        address = server.getsockname()
        stack.enter_context(socket.create_connection(address))
        assert not is_reached(*address, 0.5)
