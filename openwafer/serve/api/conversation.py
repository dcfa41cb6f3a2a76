"""Messages of the API as chat templates expect them."""

import json
from collections.abc import Sequence
from typing import Any

from openwafer.errors import UserError
from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.schema import AssistantMessage, Content, Message, SystemMessage, Tool, ToolMessage
from openwafer.serve.api.served_model import ServedModel

_INSTRUCTIONS = """You can call these functions:
{functions}
To call one, answer with nothing but
{example}
The result comes in the next message. Answer in plain words when no function is needed."""


def render(served: ServedModel, messages: Sequence[Message], tools: Sequence[Tool] = (), **variables: Any) -> str:
    """The conversation as one text, ready for the model to continue."""
    turns = [_turn(served, message) for message in messages]
    # Templates are written for a caller that always gives these two.
    variables = {"tools": None, "documents": None, **variables}
    if tools and served.template_knows_tools:
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    elif tools:
        turns = _with_instructions(served, turns, tools)
    try:
        return served.tokenizer.apply_chat_template(turns, **variables)
    except UserError as error:
        raise ApiError(400, str(error), param="messages", code="template_error") from None


def _turn(served: ServedModel, message: Message) -> dict[str, Any]:
    """Templates add content to text, so null becomes empty; they print arguments as JSON, so text is parsed."""
    turn: dict[str, Any] = {"role": message.role, "content": plain_text(message.content)}
    if isinstance(message, SystemMessage) and "developer" not in (served.tokenizer.chat_template or ""):
        turn["role"] = "system"
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        if served.template_knows_tools:
            turn["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": _parsed(arguments)}}
                for id_, name, arguments in calls
            ]
        else:
            written = [served.tool_format.write(name, arguments) for _, name, arguments in calls]
            turn["content"] = "\n".join(filter(None, [turn["content"], *written]))
    if isinstance(message, ToolMessage):
        if served.template_knows_tools:
            turn["tool_call_id"] = message.tool_call_id
        else:
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    return turn


def plain_text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_instructions(served: ServedModel, turns: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For a model whose template knows nothing of tools: say in a system message what there is and how to call it."""
    functions = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)
    example = served.tool_format.write("NAME", '{"ARGUMENT": "VALUE"}')
    text = _INSTRUCTIONS.format(functions=functions, example=example)
    if turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}".strip()}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
