"""A process that has everything imported and forks `openwafer` commands off: each as real as one from a shell
(its own process, to be stopped, killed and waited for), without the seconds that importing and first use take.

Run by `forks` in conftest.py with a socket: gets {"argv": [...], "cwd": ...} with a descriptor for the standard error,
answers with the process id; {"wait": pid, "block": bool} is answered with its exit code or null while it lives.
"""

import json
import os
import socket
import sys


def warm_up() -> None:
    """Import and use once what every training command needs. No gradients: a fork could not make any then."""
    import torch

    torch.set_num_threads(1)
    import openwafer.checkpoint
    import openwafer.params
    import openwafer.train.job  # noqa: F401
    from openwafer.graph import capture
    from openwafer.graph.deferred import deferred
    from openwafer.models.build import build
    from openwafer.models.config import ModelConfig

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 50, "max_position_embeddings": 8}
    with deferred():
        module = build(ModelConfig(**size, dropout=0.1))
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    capture(module.train(), (), {"input_ids": ids, "labels": ids.clone()})
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked whole"


def run(argv: list[str], cwd: str, stderr: int) -> int:
    from openwafer.cli.main import main

    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, target in ((null, 0), (null, 1), (stderr, 2)):
        os.dup2(descriptor, target)
    return main(argv)


def serve(connection: socket.socket) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                code = 70  # of a command that ended with an exception
                try:
                    code = run(request["argv"], request["cwd"], *descriptors)
                finally:
                    os._exit(code)
            os.close(descriptors[0])
        connection.send(json.dumps(answer).encode())


if __name__ == "__main__":
    warm_up()
    serve(socket.socket(fileno=int(sys.argv[1])))
