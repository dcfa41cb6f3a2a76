"""How many ranks, and what happens when one is lost. This module imports no torch."""

from dataclasses import dataclass

from openwafer.config import option
from openwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """The fabric between MemoryX and the workers. The number of workers is `num_csx` in `train`."""

    num_memoryx: int = option(
        1, help="hosts' ranks that hold the weights, striped (under torchrun; on one host there is one)", minimum=1
    )
    min_csx: int = option(1, help="workers to go on with at least when others are lost", minimum=1)
    csx_threads: int | None = option(
        None,
        help="threads of each worker (default: all cores, whatever num_csx is, so that it changes no bit)",
        minimum=1,
    )
    lost_after: float = option(60.0, help="seconds of silence after which a rank counts as lost", minimum=0.5)
    max_restarts: int = option(3, help="how often a run on one host starts again by itself after a loss", minimum=0)

    def check(self, num_csx: int) -> None:
        if self.min_csx > num_csx:
            raise UserError(f"min_csx {self.min_csx} is more than num_csx {num_csx}: give at most {num_csx}")
