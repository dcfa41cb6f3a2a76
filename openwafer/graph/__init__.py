"""The graph of Units: any exportable nn.Module, cut into the pieces that are streamed.

Start reading at `unit.py` (what a Unit is), then `capture.py` (how a module becomes Units) and `run.py` (how
Units run, forward and backward). `deferred.py` builds modules without allocating a weight.
"""

from openwafer.graph.capture import capture
from openwafer.graph.unit import Graph, TensorSpec, Unit, UnitFunction, WeightSpec

__all__ = ["Graph", "TensorSpec", "Unit", "UnitFunction", "WeightSpec", "capture"]
