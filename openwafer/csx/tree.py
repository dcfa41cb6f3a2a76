"""The fixed binary tree along which gradients of micro-batches are summed.

The tree over n leaves splits at the largest power of two below n, all the way down. It depends on n alone, so a
sum does not change by a bit with the number of workers: each owns a run of leaves and sums the parts of the
tree that lie inside it.
"""

from torch import Tensor


class TreeSum:
    """Adds tensors as they come, in tree order, holding about log2(n) partial sums."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Tensor]] = []  # (leaves, sum), a strictly falling power of two each

    def add(self, leaf: Tensor) -> None:
        leaves, total = 1, leaf
        while self._parts and self._parts[-1][0] == leaves:
            left_leaves, left = self._parts.pop()
            leaves, total = leaves + left_leaves, left + total
        self._parts.append((leaves, total))

    def total(self) -> Tensor:
        _, total = self._parts[-1]
        for _, left in reversed(self._parts[:-1]):
            total = left + total
        return total


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """The same sum, as the tree is defined."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return tree_sum(leaves[:split]) + tree_sum(leaves[split:])
