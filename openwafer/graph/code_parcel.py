"""Captured code on its way to another process, as the list of its operations.

PyTorch sends a GraphModule as source text and traces that where it arrives. What the code computes from no input, such
as a range or random numbers, is then computed at once and kept for good: random numbers would never change again, and
everything would be on the CPU.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg


@dataclass(frozen=True)
class NodeRef:
    """Stands for what an earlier node gives."""

    index: int


@dataclass(frozen=True)
class PackedNode:
    name: str
    op: str
    target: str  # of functions, the full name
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class CodeParcel:
    nodes: tuple[PackedNode, ...]
    parts: dict[str, "CodeParcel"]  # code that this code calls, such as the body of a loop

    @classmethod
    def of(cls, code: fx.GraphModule) -> "CodeParcel":
        place: dict[Any, Any] = {node: NodeRef(index) for index, node in enumerate(code.graph.nodes)}
        parts = {str(node.target) for node in code.graph.nodes if node.op == "get_attr"}
        nodes = tuple(
            PackedNode(
                node.name,
                node.op,
                _full_name(node.target) if node.op == "call_function" else str(node.target),
                map_arg(node.args, place.__getitem__),
                map_arg(node.kwargs, place.__getitem__),
            )
            for node in code.graph.nodes
        )
        return cls(nodes, {name: cls.of(getattr(code, name)) for name in sorted(parts)})

    def code(self) -> fx.GraphModule:
        graph = fx.Graph()
        made: list[Any] = []

        def given(item: Any) -> Any:
            return made[item.index] if isinstance(item, NodeRef) else item

        def with_nodes(value: Any) -> Any:
            return map_aggregate(value, given)

        for node in self.nodes:
            target = _named(node.target) if node.op == "call_function" else node.target
            made.append(graph.create_node(node.op, target, with_nodes(node.args), with_nodes(node.kwargs), node.name))
        return fx.GraphModule({name: part.code() for name, part in self.parts.items()}, graph)


def _full_name(function: Any) -> str:
    if isinstance(function, torch._ops.HigherOrderOperator):
        return f"torch.ops.{function.namespace}.{function.name()}"
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops.{function}"
    return f"{function.__module__}.{function.__qualname__}"


def _named(name: str) -> Any:
    module, *path = name.split(".")
    found: Any = importlib.import_module(module)
    for part in path:
        if not hasattr(found, part):
            importlib.import_module(f"{module}.{part}")
        module, found = f"{module}.{part}", getattr(found, part)
    return found
