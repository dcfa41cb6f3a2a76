"""Turns a run of skeleton operations into a Unit: finds what it reads and defines, and builds its code once.

Runs with the same operations on the same pattern of operands share one function; only the first is built.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from openwafer.errors import UserError
from openwafer.graph.cost import measure
from openwafer.graph.piece import Piece, called_block, is_block_result
from openwafer.graph.recorder import Recording
from openwafer.graph.twin import Twin
from openwafer.graph.unit import Unit, UnitFunction


@dataclass(frozen=True)
class Ref:
    """What an operand is, seen from a Unit: a weight, a buffer or a value from elsewhere."""

    kind: str  # "weight", "buffer" or "value"
    name: str


@dataclass(eq=False)
class Assembler:
    """Holds what the Units of one model share while they are being built."""

    twin: Twin
    recording: Recording
    skeleton: Piece
    pieces: dict[str, Piece]  # block key → its exported code
    functions: dict[Any, UnitFunction] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(init=False)  # the skeleton's, by name

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.skeleton.module.graph.nodes}

    def units(self, runs: list[list[fx.Node]], names: list[str]) -> list[Unit]:
        """One Unit per run."""
        operands = [self.operands(run) for run in runs]
        read = {ref.name for refs in operands for ref in refs if ref.kind == "value"}
        read |= {leaf.name for leaf in self.skeleton.outputs if isinstance(leaf, fx.Node)}
        return [
            self._unit(index, name, run, refs, self._outputs(run, read))
            for index, (name, run, refs) in enumerate(zip(names, runs, operands, strict=True))
        ]

    def _unit(self, index: int, name: str, run: list[fx.Node], operands: list[Ref], outputs: list[fx.Node]) -> Unit:
        key = self._key(run, operands, outputs)
        if key not in self.functions:
            self.functions[key] = self._function(run, operands, outputs)
        return Unit(
            index=index,
            name=name,
            function=self.functions[key],
            weights=tuple(ref.name for ref in operands if ref.kind == "weight"),
            buffers=tuple(ref.name for ref in operands if ref.kind == "buffer"),
            inputs=tuple(ref.name for ref in operands if ref.kind == "value"),
            outputs=tuple(node.name for node in outputs),
        )

    # What a run reads and defines

    def operands(self, run: list[fx.Node]) -> list[Ref]:
        """What the run reads: weights, then buffers, then values, each in order of first use."""
        refs = list(dict.fromkeys(self._refs(run)))
        return [ref for kind in ("weight", "buffer", "value") for ref in refs if ref.kind == kind]

    def _refs(self, run: list[fx.Node]) -> Iterator[Ref]:
        inside = set(run)
        for node in run:
            if is_block_result(node):
                continue
            for source, operand in self._operands(node):
                if isinstance(operand, Ref):
                    yield operand
                elif source not in inside and source.op != "get_attr":
                    yield Ref("value", source.name)

    def _operands(self, node: fx.Node) -> Iterator[tuple[fx.Node, Ref | fx.Node]]:
        """Each tensor a skeleton node reads, as (node, reference); blocks read only what their code uses."""
        index = called_block(node)
        if index is None:
            for source in node.all_input_nodes:
                yield source, self._skeleton_ref(source)
            return
        call = self.recording.calls[index]
        piece = self.pieces[call.key]
        arguments: Any = node.args[0]
        for placeholder in _used_placeholders(piece):
            if placeholder.name in piece.inputs:
                source = arguments[piece.inputs[placeholder.name]]
                yield source, self._skeleton_ref(source)
            else:
                yield placeholder, self._block_ref(index, piece, placeholder.name)

    def _skeleton_ref(self, node: fx.Node) -> Ref | fx.Node:
        if node.name in self.skeleton.weights:
            parameter = self.twin.module.get_parameter(self.skeleton.weights[node.name])
            return Ref("weight", self.twin.parameters[id(parameter)])
        if node.name in self.skeleton.buffers:
            return Ref("buffer", self._buffer_name(self.skeleton.buffers[node.name]))
        if node.name in self.skeleton.constants:
            return self._constant(f"constant.{node.name}", self.skeleton.constants[node.name])
        return node

    def _block_ref(self, index: int, piece: Piece, placeholder: str) -> Ref:
        call = self.recording.calls[index]
        if placeholder in piece.weights:
            parameter = call.module.get_parameter(piece.weights[placeholder])
            return Ref("weight", self.twin.parameters[id(parameter)])
        if placeholder in piece.buffers:
            return Ref("buffer", self._buffer_name(f"{call.path}.{piece.buffers[placeholder]}"))
        return self._constant(f"constant.{call.path}.{placeholder}", piece.constants[placeholder])

    def _buffer_name(self, path: str) -> str:
        return self.twin.buffers[id(self.twin.module.get_buffer(path))]

    def _constant(self, name: str, value: Tensor) -> Ref:
        self.constants[name] = value
        return Ref("buffer", name)

    def _outputs(self, run: list[fx.Node], read: set[str]) -> list[fx.Node]:
        """The nodes of the run that later Units or the caller read."""
        outputs = [node for node in run if node.name in read]
        for node in outputs:
            if not isinstance(node.meta["val"], Tensor):
                raise UserError(
                    f"{node.meta['val']!r} crosses from one Unit to the next: only tensors may; compute shapes "
                    "and numbers inside the block that uses them"
                )
        return outputs

    # The code of a run

    def _key(self, run: list[fx.Node], operands: list[Ref], outputs: list[fx.Node]) -> Any:
        names: dict[Any, str] = {ref: f"{ref.kind}{k}" for k, ref in enumerate(operands)}
        words = [f"{ref.kind} {self._meta(ref)}" for ref in operands]
        local = {node: f"n{k}" for k, node in enumerate(run)}

        def operand(source: fx.Node) -> str:
            if source in local:
                return local[source]
            ref = self._skeleton_ref(source)
            return names.get(ref if isinstance(ref, Ref) else Ref("value", source.name), "unused")

        for node in run:
            index = called_block(node)
            words.append(str(node.target) if index is None else self.pieces[self.recording.calls[index].key].digest)
            if node.op == "get_attr":
                words.append(str(getattr(self.skeleton.module, str(node.target)).graph))
            elif index is None:
                arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Word(operand(n)))
                words.append(repr(arguments))
            else:
                words += [names[r] if isinstance(r, Ref) else operand(s) for s, r in self._operands(node)]
        return (*words, *(local[node] for node in outputs))

    def _meta(self, ref: Ref) -> str:
        tensor = self.fake(ref)
        is_updated = ref.kind == "buffer" and ref.name in self.recording.written_buffers
        return f"{tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype} {is_updated}"

    def fake(self, ref: Ref) -> Tensor:
        """A fake tensor with the operand's shape and type."""
        if ref.name in self.constants and ref.kind == "buffer":
            return self.constants[ref.name]
        if ref.kind == "weight":
            return self.twin.module.get_parameter(ref.name)
        if ref.kind == "buffer":
            return self.twin.module.get_buffer(ref.name)
        return self.nodes[ref.name].meta["val"]

    def _function(self, run: list[fx.Node], operands: list[Ref], outputs: list[fx.Node]) -> UnitFunction:
        graph, attributes = fx.Graph(), {}
        placeholders = {ref: graph.placeholder(f"{ref.kind}_{k}") for k, ref in enumerate(operands)}
        written = self._written_values(run)
        nodes: dict[fx.Node, Any] = {}
        for ref in operands:
            if ref in written:  # the code changes this value in place: work on a copy, the caller keeps its own
                placeholders[ref] = graph.call_function(torch.ops.aten.clone.default, (placeholders[ref],))

        def resolve(source: fx.Node) -> Any:
            if source in nodes:
                return nodes[source]
            ref = self._skeleton_ref(source)
            return placeholders[ref if isinstance(ref, Ref) else Ref("value", source.name)]

        for node in run:
            index = called_block(node)
            if index is not None:
                nodes[node] = self._inline(graph, attributes, node, resolve, placeholders)
            elif is_block_result(node):
                nodes[node] = nodes[node.args[0]][node.args[1]]  # pyright: ignore
            else:
                nodes[node] = graph.node_copy(node, resolve)
                if node.op == "get_attr":
                    _attach(nodes[node], attributes, getattr(self.skeleton.module, str(node.target)))
        graph.output(tuple(nodes[node] for node in outputs))
        code = fx.GraphModule(attributes, graph)
        buffers = [ref for ref in operands if ref.kind == "buffer"]
        calls = [self.recording.calls[i] for i in map(called_block, run) if i is not None]
        return UnitFunction(
            index=len(self.functions),
            code=code,
            num_weights=sum(ref.kind == "weight" for ref in operands),
            num_buffers=len(buffers),
            updated_buffers=tuple(k for k, ref in enumerate(buffers) if ref.name in self.recording.written_buffers),
            is_random=any(call.is_random for call in calls)
            or (self.recording.is_random_outside and any(called_block(node) is None for node in run)),
            cost=measure(
                code,
                [self.fake(ref) for ref in operands],
                [ref.kind == "buffer" for ref in operands],
                self.twin.mode,
            ),
        )

    def _inline(
        self,
        graph: fx.Graph,
        attributes: dict[str, Any],
        node: fx.Node,
        resolve: Callable[[fx.Node], Any],
        placeholders: dict[Ref, fx.Node],
    ) -> list[Any]:
        """Copies a block's code into `graph`; returns its tensor results."""
        index = called_block(node)
        assert index is not None
        piece = self.pieces[self.recording.calls[index].key]
        arguments: Any = node.args[0]
        nodes: dict[fx.Node, Any] = {}
        for source in piece.module.graph.nodes:
            if source.op == "output":
                break
            if source.op != "placeholder":
                nodes[source] = graph.node_copy(source, nodes.__getitem__)
                if source.op == "get_attr":
                    _attach(nodes[source], attributes, getattr(piece.module, str(source.target)))
            elif source in _used_placeholders(piece):
                if source.name in piece.inputs:
                    nodes[source] = resolve(arguments[piece.inputs[source.name]])
                else:
                    nodes[source] = placeholders[self._block_ref(index, piece, source.name)]
        return [nodes[leaf] for leaf in piece.outputs if isinstance(leaf, fx.Node)]

    def _written_values(self, run: list[fx.Node]) -> set[Ref]:
        """Values from outside the run that it changes in place; nobody may read them afterwards."""
        inside = set(run)
        order = {node: k for k, node in enumerate(self.skeleton.module.graph.nodes)}
        written: set[Ref] = set()
        for node in run:
            for target in self._write_targets(node):
                base = _base(target)
                if base in inside or isinstance(self._skeleton_ref(base), Ref):
                    continue
                if any(order[user] > order[run[-1]] for user in base.users):
                    raise UserError(
                        f"{_where(node)} changes a tensor in place that is read again later: "
                        "use the out-of-place operation there"
                    )
                written.add(Ref("value", base.name))
        return written

    def _write_targets(self, node: fx.Node) -> Iterator[fx.Node]:
        index = called_block(node)
        if index is not None:
            arguments: Any = node.args[0]
            yield from (arguments[position] for position in self.recording.calls[index].writes_inputs)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                is_write = argument.alias_info is not None and argument.alias_info.is_write
                if is_write and isinstance(value, fx.Node):
                    yield value


class _Word(str):
    """Text that prints without quotes inside a repr, so that it cannot be confused with a string argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{self}"


def _used_placeholders(piece: Piece) -> list[fx.Node]:
    results = {leaf for leaf in piece.outputs if isinstance(leaf, fx.Node)}
    nodes = [node for node in piece.module.graph.nodes if node.op == "placeholder"]
    return [node for node in nodes if node in results or any(user.op != "output" for user in node.users)]


def _attach(node: fx.Node, attributes: dict[str, Any], nested: Any) -> None:
    """Gives a copied reference to a nested graph its own name in the new module."""
    node.target = f"nested_{len(attributes)}"
    attributes[node.target] = nested


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a chain of views looks at."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns, arguments = node.target._schema.returns, node.target._schema.arguments
        is_alias = bool(returns) and returns[0].alias_info is not None and arguments[0].alias_info is not None
        if not is_alias or not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return f"module {paths[-1] if paths else '<root>'!r} ({lines[-1] if lines else node.target})"
