"""How families of models write tool calls.

All of them write one JSON object per call, with the function's name and its arguments; they differ in what
stands around the object and in the name of the arguments.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """`sections` maps what opens a part of the text that holds calls to what closes it (None: the text's end)."""

    name: str
    sections: Mapping[str, str | None] = field(default_factory=dict)
    is_bare: bool  # an answer that begins with { or [ is a call
    arguments: str  # the key that models of this family write
    before: str = ""  # what stands around a call when it is forced
    after: str = ""
    between: str = "\n"

    def begin(self, function: str) -> str:
        """A call up to its arguments."""
        return f'{self.before}{{"name": {json.dumps(function)}, "{self.arguments}": '

    @property
    def end(self) -> str:
        return "}" + self.after

    def write(self, function: str, arguments: str) -> str:
        """A whole call as a model would have written it."""
        return self.begin(function) + arguments + self.end


FORMATS = {
    "hermes": ToolFormat(
        name="hermes",
        sections={"<tool_call>": "</tool_call>"},
        is_bare=False,
        arguments="arguments",
        before="<tool_call>\n",
        after="\n</tool_call>",
    ),
    "llama3_json": ToolFormat(
        name="llama3_json",
        sections={"<|python_tag|>": None},
        is_bare=True,
        arguments="parameters",
        between="; ",
    ),
    "generic": ToolFormat(
        name="generic",
        sections={"<tool_call>": "</tool_call>", "```json": "```", "```tool_call": "```"},
        is_bare=True,
        arguments="arguments",
        before="<tool_call>\n",
        after="\n</tool_call>",
    ),
}


def format_of_template(template: str | None) -> ToolFormat:
    """The format that a chat template teaches its model."""
    if template is not None and "tools" in template:
        if "<tool_call>" in template:
            return FORMATS["hermes"]
        if "<|python_tag|>" in template or '"parameters"' in template:
            return FORMATS["llama3_json"]
    return FORMATS["generic"]
