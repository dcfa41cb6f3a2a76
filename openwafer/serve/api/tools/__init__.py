"""Tool calls in what a model writes: `formats.py` knows the formats, `reader.py` finds the calls in a stream."""

from openwafer.serve.api.tools.formats import FORMATS, ToolFormat, format_of_template
from openwafer.serve.api.tools.reader import CallArguments, CallBegin, Delta, Text, ToolReader

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegin",
    "Delta",
    "Text",
    "ToolFormat",
    "ToolReader",
    "format_of_template",
]
