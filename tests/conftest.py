"""Fixtures that several test folders share."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, settings

from openwafer.models.pull import pull

# Before anything imports Triton: its kernels run in its interpreter here, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what runs in its background with Ctrl-C ignored, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]

# A busy machine is no failure, and the same commit has the same result; OPENWAFER_RANDOM=1 looks for new examples.
settings.register_profile(
    "openwafer",
    deadline=None,
    derandomize="OPENWAFER_RANDOM" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("openwafer")

# The files that take longest begin first: two processes share the tests by file, and one that begins late would run
# alone at the end.
_LONG_FILES = (
    "test_rank.py",
    "test_cli_swarm.py",
    "test_docs.py",
    "test_fast.py",
    "test_rank_device.py",
    "test_cli_flash.py",
    "test_swarm.py",
    "test_cli_train.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True, scope="module")
def same_kernels() -> Iterator[None]:
    """On a CPU without bf16, PyTorch gives up oneDNN for the whole process at the first bf16 product, and fp32 rounds
    otherwise from then on: no file of tests leaves that to the next."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF, pulled into the user's cache; its tests are marked `network`."""
    (path,) = pull("smollm2").glob("*.gguf")
    return path


class Fork:
    """An `openwafer` command in a process of its own."""

    def __init__(self, forks: "Forks", argv: list[str]) -> None:
        self._forks = forks
        reader, writer = os.pipe()
        self.pid: int = forks.ask({"argv": argv, "cwd": str(ROOT)}, writer)
        os.close(writer)
        self.stderr: TextIO = os.fdopen(reader)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # until it is waited for nobody else gets its id
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid, "block": False})
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid, "block": True})
        assert self.returncode is not None
        return self.returncode

    def read_until(self, word: str) -> str:
        """What it says up to the line with this word, or to its end."""
        lines = []
        for line in self.stderr:
            lines.append(line)
            if word in line:
                break
        return "".join(lines)


class Forks:
    """Starts commands from one warm process, see zygote.py."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, ROOT / "tests" / "zygote.py", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._started: list[Fork] = []

    def start(self, *argv: str | Path) -> Fork:
        self._started.append(Fork(self, [str(part) for part in argv]))
        return self._started[-1]

    def run(self, *argv: str | Path) -> tuple[int, str]:
        """Exit code and standard error of a command that ends by itself."""
        fork = self.start(*argv)
        said = fork.stderr.read()
        return fork.wait(), said

    def ask(self, request: dict[str, Any], *descriptors: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
        return json.loads(self._socket.recv(1 << 16))

    def end_all(self) -> None:
        """What a failed test left running, too."""
        for fork in self._started:
            if fork.poll() is None:
                fork.kill()
                fork.send_signal(signal.SIGCONT)
                fork.wait()
            fork.stderr.close()
        self._started.clear()

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def forks(zygote: Forks) -> Iterator[Forks]:
    """`forks.start("train", "--params", ...)` is a real process: it can be killed."""
    yield zygote
    zygote.end_all()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as each of several workers has: PyTorch's kernels may round otherwise with another number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
