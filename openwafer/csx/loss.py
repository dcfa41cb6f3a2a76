"""Which of a model's results is the loss."""

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.graph.unit import Value


@dataclass(frozen=True)
class LossNames:
    """Values of the Graph: the loss to be minimised, and the count it is a sum over (None: it is a mean)."""

    loss: str
    count: str | None


def find_loss(graph: Graph) -> LossNames:
    """A scalar, `(loss_sum, count)`, or a result with a `loss` (as `transformers` returns)."""
    result = pytree.tree_unflatten(list(graph.outputs), graph.output_tree)
    if isinstance(result, Value) and _is_scalar(graph, result):
        return LossNames(result.name, None)
    if isinstance(result, tuple) and len(result) == 2 and all(_is_scalar(graph, leaf) for leaf in result):
        loss, count = result
        if not graph.values[count.name].dtype.is_floating_point:
            return LossNames(loss.name, count.name)
    loss = _field(result, "loss")
    if _is_scalar(graph, loss):
        return LossNames(loss.name, None)
    raise UserError(
        "the model returns no loss: return a scalar, a pair (loss_sum, count) with an integer count, "
        "or an object with a scalar `loss`"
    )


def _field(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, dict) else getattr(result, name, None)


def _is_scalar(graph: Graph, leaf: Any) -> bool:
    return isinstance(leaf, Value) and graph.values[leaf.name].shape == ()
