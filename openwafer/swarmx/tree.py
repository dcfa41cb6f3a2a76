"""The fixed binary tree along which gradients of micro-batches are summed.

The tree over n leaves splits at the largest power of two below n, all the way down. It depends on n alone, so a
sum does not change by a bit with the number of workers: each owns a run of leaves and sums the parts of the
tree that lie inside it (`RangeSum`), and what is above them is summed on the way to the store (`combine`).
"""

from collections.abc import Mapping

from torch import Tensor

Node = tuple[int, int]  # the leaves [start, stop) of a whole subtree
Parts = Mapping[Node, Tensor]  # sums of whole subtrees


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


class RangeSum:
    """Adds the leaves `share` of a tree over `total` leaves, in order, and gives the sums of its whole subtrees."""

    def __init__(self, total: int, share: range) -> None:
        self._nodes = nodes_of(total, share)
        self._position = share.start
        self._sum = TreeSum()
        self._parts: dict[Node, Tensor] = {}

    def add(self, leaf: Tensor) -> None:
        self._sum.add(leaf)
        self._position += 1
        start, stop = self._nodes[len(self._parts)]
        if self._position == stop:
            self._parts[start, stop] = self._sum.total()
            self._sum = TreeSum()

    def parts(self) -> dict[Node, Tensor]:
        assert len(self._parts) == len(self._nodes), "not all leaves were added"
        return self._parts


def nodes_of(total: int, share: range) -> list[Node]:
    """The largest whole subtrees that together are the leaves `share`, in order."""

    def visit(start: int, stop: int) -> list[Node]:
        if stop <= share.start or share.stop <= start:
            return []
        if share.start <= start and stop <= share.stop:
            return [(start, stop)]
        middle = start + _split(stop - start)
        return visit(start, middle) + visit(middle, stop)

    assert 0 <= share.start < share.stop <= total
    return visit(0, total)


def combine(total: int, parts: Parts) -> Tensor:
    """The sum over all leaves from subtrees that cover them."""

    def visit(start: int, stop: int) -> Tensor:
        if (start, stop) in parts:
            return parts[start, stop]
        middle = start + _split(stop - start)
        return visit(start, middle) + visit(middle, stop)

    return visit(0, total)


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """The same sum, as the tree is defined."""
    if len(leaves) == 1:
        return leaves[0]
    split = _split(len(leaves))
    return tree_sum(leaves[:split]) + tree_sum(leaves[split:])


def _split(num_leaves: int) -> int:
    return 1 << (num_leaves - 1).bit_length() - 1
