"""Device memory: what a worker may use, and which micro-batch is chosen for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from openwafer.csx.footprint import Footprint
from openwafer.errors import UserError
from openwafer.train.device_budget import DeviceBudget, share_of_device

MIB = 1 << 20


def budget(limit: int) -> DeviceBudget:
    """Each sample of a micro-batch takes 10 MiB inside a Unit, each micro-batch 1 MiB between Units."""

    def measure(graph: Any, num_micro_batches: int) -> Footprint:
        return Footprint(
            weight_bytes=MIB,
            gradient_bytes=MIB,
            activation_bytes=num_micro_batches * MIB,
            working_bytes=graph.size * 10 * MIB,
        )

    return DeviceBudget(limit, 5 * MIB, measure)


def make_graph(size: int) -> Any:
    return SimpleNamespace(size=size)


def test_the_largest_micro_batch_that_fits_and_leaves_one_for_each_worker() -> None:
    assert budget(1000 * MIB).fit(make_graph, 12, None) == 12
    assert budget(1000 * MIB).fit(make_graph, 12, None, num_csx=2) == 6
    assert budget(1000 * MIB).fit(make_graph, 12, None, num_csx=5) == 2
    assert budget(50 * MIB).fit(make_graph, 12, None) == 4
    assert budget(50 * MIB).fit(make_graph, 12, 3, num_csx=2) == 3


def test_what_does_not_fit_is_an_error_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"a step needs .* 15 MiB are allowed .*CUDA itself 5 MiB.*micro_batch_size"):
        budget(10 * MIB).fit(make_graph, 12, None)
    with pytest.raises(UserError, match="a step needs"):
        budget(30 * MIB).fit(make_graph, 12, 6)
    with pytest.raises(UserError, match="a step needs"):
        budget(20 * MIB).check(make_graph(2), 6)


def test_workers_share_a_device_in_equal_parts() -> None:
    assert share_of_device(None, 100 * MIB, 120 * MIB) == (92 * MIB, 20 * MIB)
    assert share_of_device(None, 100 * MIB, 120 * MIB, 4) == (23 * MIB, 5 * MIB)
    assert share_of_device(60 * MIB, 100 * MIB, 120 * MIB, 4) == (10 * MIB, 5 * MIB)
    with pytest.raises(UserError, match=r"device_memory 121 MiB: the GPU has 120 MiB, and 100 MiB are free; give at "):
        share_of_device(121 * MIB, 100 * MIB, 120 * MIB)
