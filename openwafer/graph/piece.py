"""Pieces: exported graphs with plain tensor placeholders, ready to be copied into the code of a Unit.

A piece is either one block or the skeleton, the model's own code around the blocks, in which each call of a
block is a single opaque operation.
"""

import contextlib
import functools
import hashlib
import itertools
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from openwafer.errors import UserError
from openwafer.graph.recorder import BlockCall, distinct_tensors, replaced_forwards
from openwafer.graph.twin import Twin

_calls_being_exported: list[BlockCall] = []  # read by the opaque operation's shape function


@torch.library.custom_op("openwafer::block", mutates_args=())
def block_operation(tensors: list[Tensor], call: int) -> list[Tensor]:
    """Stands for one call of a block while the code around the blocks is exported; it never runs."""
    raise AssertionError(f"block call {call} was executed instead of inlined")


@block_operation.register_fake
def _block_shapes(tensors: list[Tensor], call: int) -> list[Tensor]:
    outputs = [leaf for leaf in _calls_being_exported[call].outputs if isinstance(leaf, Tensor)]
    return [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in outputs]


@dataclass(frozen=True, eq=False)
class Piece:
    """An exported graph. Placeholders appear in `graph` as usual; the maps say what each one is."""

    module: fx.GraphModule  # owns the graph and the nested graphs that it refers to
    weights: dict[str, str]  # placeholder → name of the weight inside the exported module
    buffers: dict[str, str]
    constants: dict[str, Tensor]  # placeholder → literal value
    inputs: dict[str, int]  # placeholder → position among the distinct input tensors
    outputs: tuple[Any, ...]  # flattened results: fx.Node for tensors, plain values otherwise
    output_tree: Any  # pytree spec of the results

    @functools.cached_property
    def digest(self) -> str:
        """Equal for pieces with the same code and the same placeholders.

        The recorder may tell two calls of one function apart by what autograd does around them (a weight's
        second use, say); the exported code then shows that they are the same.
        """
        nested = [str(m.graph) for m in self.module.modules() if isinstance(m, fx.GraphModule)]
        literals = [f"{name} {value.tolist()}" for name, value in self.constants.items()]
        text = "\n".join([*nested, str(self.outputs), str(self.weights), str(self.buffers), *literals])
        return hashlib.sha256(text.encode()).hexdigest()


def export_block(twin: Twin, call: BlockCall) -> Piece:
    """The block of `call`, exported on fresh fake inputs of the same shapes."""
    originals = distinct_tensors((call.args, call.kwargs))
    with twin.mode:
        fresh = {id(t): torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in originals}
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: fresh[id(t)], (call.args, call.kwargs))
    return _export(call.module, args, kwargs)


def export_skeleton(twin: Twin, blocks: dict[str, nn.Module], calls: list[BlockCall]) -> Piece:
    """The code around the blocks."""
    counter: Iterator[int]

    def opaque(path: str, module: nn.Module, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            index = next(counter)
            recorded = calls[index]
            if recorded.path != path or not _same_arguments(recorded, args, kwargs):
                raise UserError(
                    f"block {path!r} is called differently when the model runs a second time: "
                    "make forward depend on its inputs alone"
                )
            results = iter(block_operation(distinct_tensors((args, kwargs)), index))
            leaves = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in recorded.outputs]
            return pytree.tree_unflatten(leaves, recorded.output_tree)

        return call

    # Most models never look inside a block from outside; without the blocks' own weights the export of an
    # 80-layer model takes a fifth of the time.
    with contextlib.suppress(AttributeError, KeyError), _hollow(blocks):
        counter = itertools.count()
        with replaced_forwards(blocks, opaque), _exporting(calls):
            return _export(twin.module, twin.args, twin.kwargs)
    counter = itertools.count()
    with replaced_forwards(blocks, opaque), _exporting(calls):
        return _export(twin.module, twin.args, twin.kwargs)


@contextlib.contextmanager
def _hollow(blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Takes weights, buffers and submodules out of the blocks until the context ends."""
    parts = ("_parameters", "_buffers", "_modules")
    before = {path: {part: module.__dict__[part] for part in parts} for path, module in blocks.items()}
    for module in blocks.values():
        module.__dict__.update({part: {} for part in parts})
    try:
        yield
    finally:
        for path, module in blocks.items():
            module.__dict__.update(before[path])


def _same_arguments(recorded: BlockCall, args: Any, kwargs: Any) -> bool:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    before, tree_before = pytree.tree_flatten((recorded.args, recorded.kwargs))
    return tree == tree_before and all(
        isinstance(old, Tensor) and new.shape == old.shape if isinstance(new, Tensor) else new == old
        for new, old in zip(leaves, before, strict=True)
    )


@contextlib.contextmanager
def _exporting(calls: list[BlockCall]) -> Iterator[None]:
    _calls_being_exported[:] = calls
    try:
        yield
    finally:
        _calls_being_exported.clear()


def _export(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Piece:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export warns about its own internals; real problems raise
        program = torch.export.export(module, args, kwargs, strict=False)
    graph = program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    leaves = pytree.tree_leaves((args, kwargs))
    positions = {id(t): k for k, t in enumerate(distinct_tensors((args, kwargs)))}
    piece = Piece(program.graph_module, {}, {}, {}, {}, _outputs(program, nodes), program.call_spec.out_spec)
    user_inputs = iter(leaves)
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind is InputKind.PARAMETER:
            piece.weights[placeholder] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            piece.buffers[placeholder] = str(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            literal = program.constants[str(spec.target)]
            assert isinstance(literal, Tensor)
            piece.constants[placeholder] = literal
        elif spec.kind is InputKind.USER_INPUT:
            leaf = next(user_inputs)
            if isinstance(leaf, Tensor):
                piece.inputs[placeholder] = positions[id(leaf)]
        else:
            raise UserError(f"{type(module).__name__} uses a {spec.kind.name} input, which cannot be captured")
    _drop_assertions(graph)
    return piece


def _outputs(program: Any, nodes: dict[str, fx.Node]) -> tuple[Any, ...]:
    """Result leaves; updated buffers are not among them, they are changed in place by the graph."""
    return tuple(
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else nodes[spec.arg.name]
        for spec in program.graph_signature.output_specs
        if spec.kind.name == "USER_OUTPUT"
    )


def _drop_assertions(graph: fx.Graph) -> None:
    """Checks that hold by construction of the capture, and tie the code to one device."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def called_block(node: fx.Node) -> int | None:
    """The index of the block call that a skeleton node stands for, if it does."""
    if node.target is torch.ops.openwafer.block.default:
        return int(node.args[1])  # pyright: ignore[reportArgumentType]
    return None


def is_block_result(node: fx.Node) -> bool:
    """Whether a skeleton node picks one result of a block call."""
    return node.target is operator.getitem and called_block(node.args[0]) is not None  # pyright: ignore
