"""Reads the tool calls of an answer while its text arrives: the one that a grammar forces, or those that the model writes by itself.

A model writes a call in its template's form, such as `<tool_call>{"name": "add", "arguments": {..}}</tool_call>`. Text before
a call is content. Only a call of a tool that the request has counts; everything else stays text. Text after a call is dropped,
unless it is another call, as vLLM does.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, TypedDict

from service.dialects.openai.tool_calls import NAMED, STRING, CallBuilder
from service.generation.chat.call_opening import call_marker
from service.generation.model import Generator

# NAMED in pieces. A text that matches the first of them, and a part of the next, may become a call.
_STRING = ['"', STRING + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?", '"']
_PIECES = [r"\s*", r"\{", r"\s*", *'"name"', r"\s*", ":", r"\s*", *_STRING, r"\s*", ",", r"\s*", '"', "[a-z]*", '"', r"\s*", ":", r"\s*"]
_MOST = 1024  # most characters of a call before its arguments: an endless name is not searched again for every token
_BEGUN = re.compile(reduce(lambda rest, piece: f"(?:{piece}{rest})?", reversed(_PIECES), ""))


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call. `first` is whether it is the call's first part, which has the id and the name."""

    index: int
    call: CallBuilder
    arguments: str
    first: bool

    def json(self) -> dict[str, Any]:
        """Return the part as an element of `tool_calls` in a chunk of chat."""
        if not self.first:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.call.json(), "function": {"name": self.call.name, "arguments": self.arguments}}


class CallReader(Protocol):
    """`calls` are the calls that were found so far. What `push` and `end` return depends only on the text, not on how it was divided."""

    calls: list[CallBuilder]

    def push(self, text: str) -> list[str | CallPart]:
        """Add generated text, and return new content (str) and new parts of calls, in their order."""
        ...

    def end(self) -> list[str | CallPart]:
        """Return the rest, after all text was added."""
        ...


class RequiredCall:
    """Reads an answer that a grammar forces to be one call. `name` is the only tool that may be called, or None."""

    def __init__(self, name: str | None, id: str) -> None:
        self.calls = [CallBuilder(name, id)]
        self._named = False

    def push(self, text: str) -> list[str | CallPart]:
        (call,) = self.calls
        new = call.push(text)
        if call.name is None or (self._named and not new):
            return []
        first, self._named = not self._named, True
        return [CallPart(0, call, new, first)]

    def end(self) -> list[str | CallPart]:
        return []


class WrittenForm(TypedDict):
    """How a model may write calls by itself: the text before a call (`call_marker`), the names of the tools, and whether it may write
    several calls. If not, only the first counts."""

    marker: str
    tools: list[str]
    several: bool


async def written_form(
    model: Generator, tools: Sequence[dict[str, Any]], *, skip_special_tokens: bool, several: bool | None
) -> WrittenForm | None:
    """Return the form of calls of the tools that are shown to the model. None: the model writes only text. `several` None means True."""
    if not tools or (prompts := model.chat_prompts) is None or not prompts.takes_tools:
        return None
    marker = await call_marker(prompts, tools, skip_special_tokens=skip_special_tokens)
    names = [tool["function"]["name"] for tool in tools]
    return None if marker is None else {"marker": marker, "tools": names, "several": several is not False}


class WrittenCalls:
    """Reads an answer in which the model may write calls by itself."""

    def __init__(self, form: WrittenForm, id: Callable[[int], str]) -> None:
        """`id` gives the id of a call by its index."""
        self.calls: list[CallBuilder] = []
        self._marker, self._names, self._several, self._id = form["marker"], form["tools"], form["several"], id
        self._held = ""  # text that may belong to a call which is not yet known
        self._found: list[str | CallPart] = []
        self._step = self._search if self._marker else self._name

    def push(self, text: str) -> list[str | CallPart]:
        self._held += text
        while self._step():
            pass
        found, self._found = self._found, []
        return found

    def end(self) -> list[str | CallPart]:
        rest = (self._marker if self._step == self._name else "") + self._held
        return [rest] if rest and not self.calls else []

    # Each step takes text from `_held`. It returns whether the next step, which it may have set, has something to do.

    def _search(self) -> bool:
        """Look for the marker, and give the text before it as content."""
        content, marker, rest = self._held.partition(self._marker)
        if not marker:
            held = next((n for n in range(len(self._marker) - 1, 0, -1) if content.endswith(self._marker[:n])), 0)
            content, rest = content[: len(content) - held], content[len(content) - held :]
        self._found += [content] if content else []
        self._held = rest
        if marker:
            self._step = self._name
        return bool(marker)

    def _name(self) -> bool:
        """Read the object behind the marker up to the arguments. If it is no call, marker and text are content."""
        if self._calls():
            return True
        if self._may_begin():
            return False
        self._found += [self._marker] if self._marker else []
        self._step = self._search if self._marker else self._plain
        return True

    def _calls(self, at: int = 0) -> bool:
        """Return whether a call of one of the tools begins at this place of the held text. If so, begin it."""
        found = NAMED.match(self._held, at)
        if found is None or found.end() - at > _MOST or self._held[found.end()] != "{" or json.loads(found[1]) not in self._names:
            return False
        self.calls.append(CallBuilder(None, self._id(len(self.calls))))
        self._held = self._held[at:]
        self._step = self._arguments
        return True

    def _may_begin(self, at: int = 0) -> bool:
        """Return whether the held text from this place on may become a call."""
        return len(self._held) - at <= _MOST and _BEGUN.fullmatch(self._held, at) is not None

    def _arguments(self) -> bool:
        call, text, self._held = self.calls[-1], self._held, ""
        first = call.name is None
        if new := call.push(text):
            self._found.append(CallPart(len(self.calls) - 1, call, new, first))
        if call.ended:
            self._held, self._step = call.after, self._next
        return call.ended

    def _next(self) -> bool:
        """Look for another call, and drop the text before it."""
        at = self._held.find("{") if self._several else -1
        while at >= 0:
            if self._calls(at):
                return True
            if self._may_begin(at):
                break
            at = self._held.find("{", at + 1)
        self._held = self._held[at:] if at >= 0 else ""
        return False

    def _plain(self) -> bool:
        self._found += [self._held] if self._held else []
        self._held = ""
        return False


def content_of(parts: Sequence[str | CallPart]) -> str:
    return "".join(part for part in parts if isinstance(part, str))
