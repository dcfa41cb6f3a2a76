"""Where one Unit ends and the next begins, along the skeleton's operations.

A heavy block (one with a matrix or convolution) starts a Unit; light blocks (an activation, a norm) join the
Unit before them. Code outside the blocks becomes a Unit of its own where it has weights (embedding, head),
else it joins the block it leads to. What follows the last block is the last Unit.
"""

from collections.abc import Callable

from torch import fx

from openwafer.graph.blocks import is_heavy
from openwafer.graph.piece import Piece, called_block, is_block_result
from openwafer.graph.recorder import BlockCall


def split(skeleton: Piece, calls: list[BlockCall]) -> list[list[fx.Node]]:
    """The skeleton's operations, cut into consecutive runs: one per Unit."""
    runs: list[list[fx.Node]] = []
    current: list[fx.Node] = []  # the Unit being filled, which ends with a block
    pending: list[fx.Node] = []  # operations since then, outside every block
    has_weights = _weight_test(skeleton, min_dim=1)
    has_core = _core_test(skeleton, calls)

    def close(run: list[fx.Node]) -> None:
        if run:
            runs.append(list(run))
            run.clear()

    for node in skeleton.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        index = called_block(node)
        if is_block_result(node):
            current.append(node)
        elif index is None:
            pending.append(node)
        else:
            if any(has_weights(n) for n in pending):
                close(current)
                close(pending)
            elif is_heavy(calls[index].module) and any(has_core(n) for n in current):
                close(current)
            current += [*pending, node]
            pending.clear()
    close(current)
    close(pending)
    return runs


def _weight_test(skeleton: Piece, min_dim: int) -> Callable[[fx.Node], bool]:
    """Whether an operation reads a weight of at least `min_dim` dimensions."""

    def test(node: fx.Node) -> bool:
        sources = node.all_input_nodes
        return any(n.name in skeleton.weights and n.meta["val"].dim() >= min_dim for n in sources)

    return test


def _core_test(skeleton: Piece, calls: list[BlockCall]) -> Callable[[fx.Node], bool]:
    """Whether an operation brings a matrix into its Unit, directly or through a block."""
    reads_matrix = _weight_test(skeleton, min_dim=2)

    def test(node: fx.Node) -> bool:
        index = called_block(node)
        return reads_matrix(node) if index is None else is_heavy(calls[index].module)

    return test
