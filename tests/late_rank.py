"""`openwafer` under torchrun with a device of host memory (see late_device.py) for each worker instead of a GPU."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from late_device import LateDevice

from openwafer.cli.main import main
from openwafer.train.rank_device import Place, RankDevice


def late(num_memoryx: int, device_memory: int | None) -> RankDevice | None:
    place = Place.of_this_rank(num_memoryx, os.environ)
    return None if place is None else RankDevice(LateDevice(place.index), device_memory, place.num_sharing(1))


if __name__ == "__main__":
    RankDevice.of_this_rank = late
    sys.exit(main(sys.argv[1:]))
