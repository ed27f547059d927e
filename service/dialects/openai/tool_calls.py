"""Calls of tools that a request demands (`tool_choice` required, one by name, or one of those allowed): a grammar forces the text to be a
call, and this parses it.

One call an answer. Where a single tool may be called the text is its arguments; where there are several it is
`{"name": .., "arguments": {..}}`. The arguments satisfy the tool's schema; objects of it that name their properties have no others, unless
the schema says so, for a model would fill an answer with them. With `auto` nothing is demanded: the tools are shown to a template that has
a place for them, and what the model writes is text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import Field

from service.dialects import generation
from service.errors import InvalidRequest
from service.generation.request import Delta, FinishReason, Grammar
from service.http.fields import Fields

Tool = TypeVar("Tool")
_NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
_OPEN = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "patternProperties", "additionalProperties", "unevaluatedProperties")


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """Chat's form; in responses the name is beside the type."""

    type: Literal["function"]
    function: FunctionName


class Allowed(Fields):
    """Some of the tools: `auto` shows them to the model, `required` has one of them called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedTools(Fields):
    """Chat's form; in responses mode and tools are beside the type."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


@dataclass(frozen=True)
class Calling:
    """The tools that may be called, by name, with the schemas of their arguments."""

    tools: Mapping[str, Mapping[str, Any] | None]

    @classmethod
    def of(cls, choice: str, tools: Mapping[str, Mapping[str, Any] | None]) -> "Calling | None":
        """`choice`: none, auto, required or a tool's name in quotes. None where no call is demanded."""
        if choice in ("none", "auto"):
            return None
        if not tools:
            raise InvalidRequest("tool_choice demands a call and there are no tools: send `tools`", param="tool_choice")
        if choice == "required":
            return cls(tools)
        name = json.loads(choice)
        _check_names([name], tools)
        return cls({name: tools[name]})

    def grammar(self) -> Grammar:
        schemas = [_closed(parameters) for parameters in self.tools.values()]
        if len(schemas) == 1:
            return replace(generation.json_schema(schemas[0], "tools"), param="tools")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{at}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for at, name in enumerate(self.tools)
        ]
        defs = {f"tool{at}": _moved(schema, f"#/$defs/tool{at}") for at, schema in enumerate(schemas)}
        return replace(generation.json_schema({"anyOf": calls, "$defs": defs}, "tools"), param="tools")

    def call(self) -> "CallBuilder":
        return CallBuilder(next(iter(self.tools)) if len(self.tools) == 1 else None)


class CallBuilder:
    """Builds one call from its text, while that arrives."""

    def __init__(self, name: str | None) -> None:
        """`name`: the only tool; the text is then its arguments."""
        self.id = generation.new_id("call_")
        self.name = name
        self.arguments = ""
        self._bare = name is not None
        self._held = ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> str:
        """Add text. Returns what it adds to the arguments."""
        if self.name is None:
            self._held += text
            found = _NAMED.match(self._held)
            if found is None:
                return ""
            self.name, text, self._held = json.loads(found[1]), self._held[found.end() :], ""
        new = text if self._bare else self._within(text)
        self.arguments += new
        return new

    def _within(self, text: str) -> str:
        """The arguments so far: from their first brace to its closing one."""
        if self._depth < 0:
            return ""
        for at, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._depth = -1
                    return text[: at + 1]
        return text

    def json(self) -> dict[str, Any]:
        """Chat's form of it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name or "", "arguments": self.arguments}}


def _check_names(names: Sequence[str], tools: Collection[str]) -> None:
    for name in names:
        if name not in tools:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools: {', '.join(tools)}", param="tool_choice")


def only(names: Sequence[str], tools: Mapping[str, Tool]) -> list[Tool]:
    """The tools that `names` allows, in their own order. InvalidRequest for a name without a tool."""
    _check_names(names, tools)
    return [tool for name, tool in tools.items() if name in names]


def finish_reason(delta: Delta) -> FinishReason | Literal["tool_calls"] | None:
    """The finish reason of a call: `tool_calls` if the grammar reached its end, not if a stop string cut it."""
    return "tool_calls" if delta.finish_reason == "stop" and delta.stop_reason is None else delta.finish_reason


def _closed(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of arguments, an object in any case; without parameters an empty one, as OpenAI has it."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    if not {"type", "$ref", "anyOf", "allOf", "oneOf"} & set(schema):
        schema["type"] = "object"
    closed: dict[str, Any] = _each(schema, _without_others)
    return closed


def _without_others(node: dict[str, Any]) -> dict[str, Any]:
    if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not any(name in node for name in _OPEN):
        return {**node, "additionalProperties": False}
    return node


def _moved(schema: dict[str, Any], to: str) -> Any:
    """The schema with its references adjusted, since it is no longer the root."""

    def move(node: dict[str, Any]) -> dict[str, Any]:
        ref = node.get("$ref")
        return {**node, "$ref": to + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else node

    return _each(schema, move)


def _each(value: Any, change: Any) -> Any:
    """Change every object inside. InvalidRequest for a schema that is nested too deeply."""
    try:
        return _changed(value, change)
    except RecursionError:
        raise InvalidRequest("the parameters of a tool are nested too deeply", param="tools") from None


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return change({key: _changed(inner, change) for key, inner in value.items()})
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    return value


def arguments_of(text: str) -> Any:
    """A call's arguments for templates: an object, or the text if it is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unique(names: Sequence[str]) -> None:
    """InvalidRequest if two tools have one name."""
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise InvalidRequest(f"two tools are called {twice!r}: give each a name of its own", param="tools")
