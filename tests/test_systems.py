"""The machines as data."""

import pytest

from openwafer.errors import UserError
from openwafer.systems import CS3, SYSTEMS, WAFERS, WSE2, wafer


def test_vendor_totals_follow_from_the_parts() -> None:
    for chip in WAFERS.values():
        # 48 KB per core make the memory on the slides within 10 %.
        assert chip.num_cores * chip.sram_bytes == pytest.approx(chip.memory_bytes, rel=0.1)
        assert chip.usable_pes <= chip.fabric_columns * chip.fabric_rows <= chip.num_cores * 1.01
    assert WSE2.usable_pes == 750 * 994


def test_the_clock_is_a_parameter() -> None:
    assert WSE2.seconds(1100) == pytest.approx(1e-6)
    words = CS3.io_words_per_cycle
    assert words == pytest.approx(1.2e12 / 32 / 1.1e9)


def test_names() -> None:
    assert wafer("cs2") is wafer("wse2") is SYSTEMS["cs2"].wafer
    with pytest.raises(UserError, match="unknown wafer 'wse22': did you mean 'wse2'"):
        wafer("wse22")
