"""What torchrun tells each process that it starts, for training and for serving; imports no torch."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from openwafer.errors import UserError

_PR_SET_PDEATHSIG = 1


def is_distributed() -> bool:
    """Whether torchrun, or someone who sets what it sets, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def end_with_launcher() -> None:
    """From now on SIGTERM comes when torchrun itself is killed, as it does when torchrun is asked to end.

    Only Linux can tell, and only the process that started this one counts, so nothing is done without torchrun.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def world_size() -> int:
    """Of all hosts, where `is_distributed`."""
    return int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Launched:
    """This process among all, and among those of its host, whose ranks follow each other."""

    rank: int
    local_rank: int
    local_size: int

    @classmethod
    def read(cls, environment: Mapping[str, str], why: str) -> "Launched":
        """`why`: what is not known if a number is missing."""
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in environment]
        if missing:
            raise UserError(f"{missing[0]} is not set, so {why}: start with torchrun")
        return cls(*(int(environment[name]) for name in names))

    @property
    def first_of_host(self) -> int:
        """The rank of this host's first process."""
        return self.rank - self.local_rank
