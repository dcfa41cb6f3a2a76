"""Capture: any exportable nn.Module becomes a Graph of Units, on fake tensors, in seconds at any size.

1. A fake run writes down what each block does (`recorder.py`), which tells the distinct blocks apart.
2. `torch.export` is asked for each distinct block once, and for the code around the blocks (`piece.py`).
3. The code is cut into Units (`split.py`), and each is bound to its weights and values (`assemble.py`).
"""

from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from openwafer.graph.assemble import Assembler
from openwafer.graph.blame import explained
from openwafer.graph.blocks import find_blocks, is_heavy
from openwafer.graph.piece import Piece, called_block, export_block, export_skeleton
from openwafer.graph.recorder import distinct_tensors, record
from openwafer.graph.split import split
from openwafer.graph.twin import make_twin
from openwafer.graph.unit import Graph, TensorSpec, Unit, Value, WeightSpec, padded


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Graph:
    """The Graph of `module` for inputs shaped like `args` and `kwargs` (real, meta or fake tensors).

    The module may live on any device, also meta; it is left as it was. Train or eval mode is captured as it is
    set. `dtype` captures the model as if its floating-point weights, saved buffers and inputs had that type.
    """
    twin = make_twin(module, args, kwargs or {}, dtype)
    blocks = find_blocks(twin.module)
    with explained(twin.module):
        recording = record(twin, blocks)
        pieces: dict[str, Piece] = {}
        for call in recording.calls:
            if call.key not in pieces:
                pieces[call.key] = export_block(twin, call)
        called = {call.path for call in recording.calls}
        skeleton = export_skeleton(twin, {p: m for p, m in blocks.items() if p in called}, recording.calls)
    assembler = Assembler(twin, recording, skeleton, pieces)
    runs = split(skeleton, recording.calls)
    units = assembler.units(runs, _unique([_run_name(run, assembler) for run in runs]))
    return _graph(assembler, units, module)


def _graph(assembler: Assembler, units: list[Unit], module: nn.Module) -> Graph:
    twin, skeleton = assembler.twin, assembler.skeleton
    placeholders = {position: name for name, position in skeleton.inputs.items()}
    read = {name for unit in units for name in unit.inputs}
    results = tuple(Value(leaf.name) if isinstance(leaf, fx.Node) else leaf for leaf in skeleton.outputs)
    read |= {leaf.name for leaf in results if isinstance(leaf, Value)}
    given = [placeholders.get(k) for k in range(len(distinct_tensors((twin.args, twin.kwargs))))]
    buffers = {id(b): n for n, b in twin.module.named_buffers()}
    specs = {name: TensorSpec.of(twin.module.get_buffer(name)) for name in buffers.values()}
    specs |= {name: TensorSpec.of(value) for name, value in assembler.constants.items()}
    used = {name for unit in units for name in unit.buffers}
    return Graph(
        units=tuple(units),
        weights=_weights(units, twin.module, module),
        buffers={name: spec for name, spec in specs.items() if name in used},
        values={name: TensorSpec.of(assembler.nodes[name].meta["val"]) for name in sorted(read)},
        inputs=tuple(name if name in read else None for name in given),
        outputs=results,
        output_tree=skeleton.output_tree,
        constants=dict(assembler.constants),
    )


def _weights(units: list[Unit], twin: nn.Module, module: nn.Module) -> dict[str, WeightSpec]:
    """Every weight in the flat layout of the first Unit that uses it; the user's module says which are trained."""
    weights: dict[str, WeightSpec] = {}
    for unit in units:
        offset = 0
        for name in unit.weights:
            if name not in weights:
                spec = TensorSpec.of(twin.get_parameter(name))
                is_trained = module.get_parameter(name).requires_grad
                weights[name] = WeightSpec(name, spec, is_trained, unit.index, offset)
                offset += padded(spec.num_elements)
    return weights


def _run_name(run: list[fx.Node], assembler: Assembler) -> str:
    """A Unit is called after its block, else after the module of its first matrix."""
    calls = [assembler.recording.calls[index] for index in map(called_block, run) if index is not None]
    for call in sorted(calls, key=lambda call: not is_heavy(call.module)):
        return call.path
    weights = [ref.name for ref in assembler.operands(run) if ref.kind == "weight"]
    for name in sorted(weights, key=lambda name: assembler.twin.module.get_parameter(name).dim() < 2):
        return name.rpartition(".")[0] or "model"
    return "output"


def _unique(names: list[str]) -> list[str]:
    """A block that is called again gets `name@2` and so on."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}@{seen[name]}")
    return unique
