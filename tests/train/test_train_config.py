"""Which steps a run traces."""

from pathlib import Path

import pytest

from openwafer.errors import UserError
from openwafer.train.config import TraceConfig


def test_steps_to_trace() -> None:
    assert TraceConfig().trace is None
    assert TraceConfig(trace=Path("trace.json"), trace_steps=(3, 5)).trace_steps == (3, 5)
    assert TraceConfig(trace=Path("trace.json"), trace_steps=(3,)).trace_steps == (3,)
    for steps, got in (((5, 3), "got 5,3"), ((1, 2, 3), "got 1,2,3"), ((), "got none")):
        with pytest.raises(UserError, match=f"one step or a first and a last such as 10,12, {got}"):
            TraceConfig(trace=Path("trace.json"), trace_steps=steps)
    with pytest.raises(UserError, match="--trace FILE says where: give both"):
        TraceConfig(trace_steps=(3, 5))
