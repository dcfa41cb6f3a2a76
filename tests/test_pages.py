"""Large arrays begin at a huge page, are zero, and a machine that has not enough memory says so."""

import pytest
import torch

from openwafer.errors import UserError
from openwafer.pages import mapped, zeros


@pytest.mark.parametrize("num_elements", [0, 5, 1 << 20, (1 << 23) + 1])
def test_zeroed_and_writable(num_elements: int) -> None:
    array = zeros(num_elements, torch.float32)
    assert array.shape == (num_elements,)
    assert not array.any()
    array.fill_(3.0)
    assert array.sum() == 3.0 * num_elements


def test_large_arrays_begin_at_a_huge_page() -> None:
    array = zeros(1 << 24, torch.float32)
    assert array.data_ptr() % (2 << 20) == 0
    view = array[100:200]
    del array
    view.fill_(1.0)  # a view keeps the pages
    assert view.sum() == 100


def test_too_much_names_the_way_out() -> None:
    with pytest.raises(UserError, match=r"cannot get .* GiB of host memory .* --flash"):
        mapped(1 << 60)
