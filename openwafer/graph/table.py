"""The table of a Graph's Units, for people and for scripts."""

from typing import Any

from openwafer.graph.unit import Graph, Unit


def rows(graph: Graph) -> list[dict[str, Any]]:
    """One plain dict per Unit."""
    return [_row(graph, unit) for unit in graph.units]


def as_json(graph: Graph) -> dict[str, Any]:
    """The whole table with its totals."""
    table = rows(graph)
    return {
        "num_units": len(graph.units),
        "num_functions": len(graph.functions),
        "num_parameters": graph.num_parameters,
        "weight_bytes": sum(row["weight_bytes"] for row in table),
        "forward_flops": sum(row["forward_flops"] for row in table),
        "backward_flops": sum(row["backward_flops"] for row in table),
        "units": table,
    }


def as_text(graph: Graph) -> str:
    """Aligned columns; runs of Units with one function are shown as one line each, so 96 layers fit a screen."""
    header = ["unit", "name", "code", "parameters", "weights", "forward", "backward", "out", "kept"]
    lines = [header]
    for first, last in _runs(graph):
        row = _row(graph, first)
        count = last.index - first.index + 1
        name = first.name if count == 1 else f"{first.name} ... {last.name}"
        lines.append(
            [
                str(first.index) if count == 1 else f"{first.index}-{last.index}",
                name,
                f"f{row['function']}",
                f"{row['num_parameters']:,}" + (f" x {count}" if count > 1 else ""),
                _bytes(row["weight_bytes"]),
                _flops(row["forward_flops"]),
                _flops(row["backward_flops"]),
                _bytes(row["output_bytes"]),
                _bytes(row["saved_bytes"]),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(_aligned(cell, widths[k], left=k < 3) for k, cell in enumerate(line)) for line in lines]
    total = as_json(graph)
    text.append(
        f"{total['num_parameters']:,} parameters ({_bytes(total['weight_bytes'])}), {total['num_units']} Units, "
        f"{total['num_functions']} distinct; {_flops(total['forward_flops'])} forward and "
        f"{_flops(total['backward_flops'])} backward per micro-batch"
    )
    return "\n".join(line.rstrip() for line in text)


def _row(graph: Graph, unit: Unit) -> dict[str, Any]:
    owned = graph.owned(unit)
    cost = unit.function.cost
    return {
        "index": unit.index,
        "name": unit.name,
        "function": unit.function.index,
        "num_parameters": sum(weight.spec.num_elements for weight in owned),
        "weight_bytes": sum(weight.spec.num_bytes for weight in owned),
        "weights": list(unit.weights),
        "inputs": _shapes(graph, unit.inputs),
        "outputs": _shapes(graph, unit.outputs),
        "output_bytes": sum(graph.values[name].num_bytes for name in unit.outputs),
        "forward_flops": cost.forward_flops,
        "backward_flops": cost.backward_flops,
        "saved_bytes": cost.saved_bytes,
        "updates_buffers": list(unit.updated_buffers),
        "is_random": unit.function.is_random,
    }


def _shapes(graph: Graph, names: tuple[str, ...]) -> dict[str, str]:
    specs = {name: graph.values[name] for name in names}
    return {name: f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}" for name, spec in specs.items()}


def _runs(graph: Graph) -> list[tuple[Unit, Unit]]:
    """(first, last) of consecutive Units with the same function and the same size."""
    runs: list[tuple[Unit, Unit]] = []
    for unit in graph.units:
        if runs and runs[-1][1].function is unit.function and _size(graph, runs[-1][1]) == _size(graph, unit):
            runs[-1] = (runs[-1][0], unit)
        else:
            runs.append((unit, unit))
    return runs


def _size(graph: Graph, unit: Unit) -> int:
    return graph.flat_elements(unit)


def _aligned(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def _bytes(count: int) -> str:
    return _scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def _flops(count: int) -> str:
    return _scaled(count, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"])


def _scaled(count: float, base: int, units: list[str]) -> str:
    if count < base:
        return f"{count} {units[0]}"
    power = 0
    while count >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.1f} {units[power]}"
