"""Finds tool calls in text that arrives in pieces and passes on what is new of text and calls at once."""

import uuid
from dataclasses import dataclass

from openwafer.serve.api.tools.call import CallState, CallText
from openwafer.serve.api.tools.formats import ToolFormat

_BETWEEN_CALLS = " \t\r\n,;[]"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Said once for each call, before its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Delta = Text | CallBegin | CallArguments


class ToolReader:
    """`push` text; get text, beginnings of calls, and fragments of their arguments.

    What may still become the mark that opens a call is held back, and so is white space at the very
    beginning: an answer that only calls tools has no text.
    """

    def __init__(self, style: ToolFormat, names: frozenset[str], *, is_parallel: bool = True) -> None:
        self._style = style
        self._names = names
        self._is_parallel = is_parallel
        self._buffer = ""  # text not yet looked at
        self._section = ""  # what was read since the section opened, until a call in it is certain
        self._closer: str | None = None
        self._in_section = False
        self._call: CallText | None = None
        self._has_begun = False  # the call under way was announced
        self._has_text = False
        self._is_after_call = False  # and nothing but white space has followed yet
        self._closing = ""  # a part of a section's closing mark
        self.num_calls = 0
        self.is_done = False  # nothing more is wanted

    @property
    def has_calls(self) -> bool:
        """Also one that is not finished."""
        return self.num_calls > 0 or self._has_begun

    def push(self, piece: str) -> list[Delta]:
        out: list[Delta] = []
        self._buffer += piece
        while self._buffer and not self.is_done:
            if not self._in_section:
                if not self._look_for_section(out):
                    break
            elif self._call is None:
                self._between_calls(out)
            else:
                self._in_call(out)
        if self._call is not None:
            self._pass_on(out)
        return _joined(out)

    def finish(self) -> list[Delta]:
        """The text ends: whatever waited is text, unless it belongs to a call."""
        out: list[Delta] = []
        if self.is_done:
            return out
        if not self._in_section:
            self._say(self._buffer, out)
        elif not self._has_begun and self.num_calls == 0:
            self._say(self._section, out)
        elif not self._has_begun and self._call is not None:
            self._say(self._call.raw, out)
        self.is_done = True
        return _joined(out)

    def _look_for_section(self, out: list[Delta]) -> bool:
        """Whether there is more to do with the buffer."""
        buffer = self._buffer
        found = [(buffer.find(mark), mark) for mark in self._style.sections if mark in buffer]
        stripped = buffer.lstrip()
        if self._style.is_bare and not self._has_text and stripped[:1] in ("{", "["):
            found.append((len(buffer) - len(stripped), ""))
        if found:
            at, mark = min(found)
            if buffer[:at].strip() or self._has_text or self._is_after_call:
                self._say(buffer[:at], out)
                at_section = at
            else:
                at_section = 0  # white space that is shown only if the section is no call
            self._in_section, self._section = True, buffer[at_section : at + len(mark)]
            self._closer = self._style.sections.get(mark)
            self._buffer = buffer[at + len(mark) :]
            return True
        keep = self._unsafe(buffer)
        if not self._has_text and not self._is_after_call and not stripped:
            keep = len(buffer)
        self._say(buffer[: len(buffer) - keep], out)
        self._buffer = buffer[len(buffer) - keep :]
        return False

    def _unsafe(self, text: str) -> int:
        """How many characters at the end could begin a section."""
        longest = max(map(len, self._style.sections), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[len(text) - size :]) for mark in self._style.sections):
                return size
        return 0

    def _between_calls(self, out: list[Delta]) -> None:
        char, self._buffer = self._buffer[0], self._buffer[1:]
        self._section += char
        if self._closer is not None and self._closer.startswith(self._closing + char):
            self._closing += char
            if self._closing == self._closer:
                self._close(out)
        elif char == "{" and not self._closing:
            self._call, self._has_begun = CallText(self._names), False
            self._call.feed(char)
        elif char not in _BETWEEN_CALLS or self._closing:
            self._close(out)

    def _close(self, out: list[Delta]) -> None:
        """The section ends; one without a call was text all along."""
        is_text = self.num_calls == 0 or self._closing != (self._closer or "")
        if is_text:
            # After calls only what follows the last of them is text; before that, all of it.
            text = self._section if self.num_calls == 0 else self._section.lstrip(_BETWEEN_CALLS)
            self._say(text, out)
        self._in_section, self._section, self._closing = False, "", ""

    def _in_call(self, out: list[Delta]) -> None:
        call = self._call
        assert call is not None
        at = 0
        while at < len(self._buffer) and call.state is CallState.READING:
            call.feed(self._buffer[at])
            at += 1
        if not self._has_begun and self.num_calls == 0:
            self._section += self._buffer[:at]
        self._buffer = self._buffer[at:]
        if call.state is CallState.NOT_A_CALL:
            if not self._has_begun:
                self._say(self._section if self.num_calls == 0 else call.raw, out)
            self._call = None
            self._in_section, self._section, self._closing = False, "", ""
        elif call.state is CallState.DONE:
            self._pass_on(out)
            self._call, self._section = None, ""
            self.num_calls += 1
            self._is_after_call = True
            self.is_done = not self._is_parallel

    def _pass_on(self, out: list[Delta]) -> None:
        call = self._call
        if call is None or call.name is None or call.state is CallState.NOT_A_CALL:
            return
        if not self._has_begun:
            self._has_begun = True
            out.append(CallBegin(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", call.name))
        if text := call.take():
            out.append(CallArguments(self.num_calls, text))

    def _say(self, text: str, out: list[Delta]) -> None:
        if self._is_after_call:
            text = text.lstrip()  # models put white space between calls, and nobody wants to see it
        if text:
            self._has_text, self._is_after_call = True, False
            out.append(Text(text))


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring texts as one."""
    out: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, Text) and out and isinstance(out[-1], Text):
            out[-1] = Text(out[-1].text + delta.text)
        else:
            out.append(delta)
    return out
