"""Groups of weights: which settings a weight has, by its name."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from openwafer.errors import UserError
from openwafer.graph import Graph
from openwafer.memoryx.config import GroupConfig


def group_of(name: str, groups: Sequence[GroupConfig]) -> GroupConfig | None:
    """The first group that matches."""
    return next((group for group in groups if _matches(name, group.patterns)), None)


def with_groups(graph: Graph, groups: Sequence[GroupConfig]) -> Graph:
    """The Graph with the weights of frozen groups not trained. A pattern that fits no weight is a mistake."""
    for group in groups:
        for pattern in group.patterns:
            if not any(_matches(name, [pattern]) for name in graph.weights):
                raise UserError(f"no weight is called {pattern!r}{_near(pattern, graph.weights)}")
    if not any(group.frozen for group in groups):
        return graph
    weights = {
        name: dataclasses.replace(weight, requires_grad=weight.requires_grad and not _is_frozen(name, groups))
        for name, weight in graph.weights.items()
    }
    if not any(weight.requires_grad for weight in weights.values()):
        raise UserError("every weight is frozen: nothing is left to train")
    return dataclasses.replace(graph, weights=weights)


def _is_frozen(name: str, groups: Sequence[GroupConfig]) -> bool:
    group = group_of(name, groups)
    return group is not None and group.frozen


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _near(pattern: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return f": the nearest are {', '.join(near)}; * stands for any text"
