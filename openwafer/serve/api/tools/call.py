"""One tool call, read character by character: its name and arguments are known before its text ends."""

import json
from dataclasses import dataclass, field
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")


class CallState(Enum):
    READING = auto()
    DONE = auto()
    NOT_A_CALL = auto()


class _At(Enum):
    KEY = auto()  # before a key, a comma or the end of the object
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()


@dataclass(slots=True)
class CallText:
    """Feed it a call's JSON object from its opening brace on.

    `name` is set as soon as it is known. `take()` gives the arguments' text that is new since the last time;
    while the name is not known, it waits. `raw` is everything read while it could still turn out to be no call.
    """

    names: frozenset[str]
    name: str | None = None
    raw: str = ""
    state: CallState = CallState.READING
    _at: _At = _At.VALUE
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _key: str = ""
    _token: list[str] = field(default_factory=list)  # the key or value under way
    _arguments: list[str] = field(default_factory=list)
    _has_arguments: bool = False

    def feed(self, char: str) -> None:
        if self.name is None:
            self.raw += char
        if self._depth == 0:
            self._depth = 1
            self._at = _At.KEY
            self.state = CallState.READING if char == "{" else CallState.NOT_A_CALL
        elif self._at is _At.IN_VALUE:
            self._in_value(char)
        elif self._at is _At.IN_KEY:
            self._in_key(char)
        elif not char.isspace():
            self._between(char)

    def take(self) -> str:
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _between(self, char: str) -> None:
        if self._at is _At.KEY and char == '"':
            self._at, self._token = _At.IN_KEY, [char]
        elif self._at is _At.KEY and char == "}":
            self._end()
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE and char not in ",:}]":
            self._at, self._token = _At.IN_VALUE, []
            self._in_value(char)
        elif not (self._at is _At.KEY and char == ","):
            self.state = CallState.NOT_A_CALL

    def _in_key(self, char: str) -> None:
        self._token.append(char)
        if self._string_ends(char):
            self._key = _decoded("".join(self._token))
            self._at = _At.COLON

    def _in_value(self, char: str) -> None:
        """A value ends with its closing quote or bracket, or before the comma or brace that follows a scalar."""
        if self._in_string:
            self._keep(char)
            if self._string_ends(char) and self._depth == 1:
                self._value_ends()
            return
        if self._depth == 1 and char in ",}":
            self._value_ends()
            self._between(char)
            return
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._value_ends()

    def _string_ends(self, char: str) -> bool:
        """Follows escapes; the opening quote of a key is not seen here, that of a value was."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _keep(self, char: str) -> None:
        if self._key in _ARGUMENTS and (self._has_arguments or (not self._token and char in "{[")):
            # An object or array: its text is the arguments, passed on as it comes.
            self._has_arguments = True
            self._arguments.append(char)
        else:
            self._token.append(char)

    def _value_ends(self) -> None:
        self._at = _At.KEY
        text = "".join(self._token).strip()
        if self._key == "name":
            self.name = _decoded(text)
            if self.name not in self.names:
                self.state = CallState.NOT_A_CALL
        elif self._key in _ARGUMENTS and not self._has_arguments:
            # Some models write the arguments as a string that holds JSON; null means none.
            self._has_arguments = True
            self._arguments.append(_decoded(text) if text.startswith('"') else "{}" if text == "null" else text)
        self._key = ""

    def _end(self) -> None:
        if self.name not in self.names:
            self.state = CallState.NOT_A_CALL
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self.state = CallState.DONE


def _decoded(text: str) -> str:
    """The text in a JSON string; anything else is no name."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
