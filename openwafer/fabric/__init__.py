"""The wafer itself: a cycle-level simulator of a mesh of programmable PEs. Knows nothing of PyTorch.

Start with docs/fabric.md, then `layout.py` (where programs run), `program.py` (how they are written),
`reference.py` (what happens in a cycle: the definition) and `csrc/` (the same, fast). `kernels/` is the library.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openwafer.fabric.fault import ArchitectureError, Fault
    from openwafer.fabric.isa import Fabric, Mem, Op, Reg
    from openwafer.fabric.layout import EAST, NORTH, RAMP, SOUTH, WEST, Layout, Rect
    from openwafer.fabric.program import ProgramBuilder
    from openwafer.fabric.simulation import Report, Simulation

__all__ = [
    "EAST", "NORTH", "RAMP", "SOUTH", "WEST", "ArchitectureError", "Fabric", "Fault", "Layout", "Mem", "Op",
    "ProgramBuilder", "Rect", "Reg", "Report", "Simulation",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(("ArchitectureError", "Fault"), "fault"),
    **dict.fromkeys(("Fabric", "Mem", "Op", "Reg"), "isa"),
    **dict.fromkeys(("EAST", "NORTH", "RAMP", "SOUTH", "WEST", "Layout", "Rect"), "layout"),
    "ProgramBuilder": "program",
    **dict.fromkeys(("Report", "Simulation"), "simulation"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
