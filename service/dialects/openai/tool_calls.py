"""Tool calls that a request requires with `tool_choice`: a call of any tool, of a named tool, or of one of the allowed tools.

A grammar forces the text to be a call, and `CallBuilder` parses the text. Such an answer has one call. If only one tool may be
called, the text is the tool's arguments; otherwise the text is `{"name": .., "arguments": {..}}`. The arguments satisfy the tool's schema.
If the model's template has a form for calls, such as `<tool_call>`, the prompt ends with the beginning of a call in this form.
Objects that list their properties get no other properties unless the schema allows them explicitly, since a model could
otherwise generate endless properties. With `auto` no call is required: the template shows the tools to the model if it can, and the
model writes text or calls (`written_calls.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.dialects.text.answer import new_id
from service.dialects.text.grammars import json_schema
from service.dialects.text.schemas import Function, FunctionName, NamedTool
from service.errors import InvalidRequest
from service.generation.chat.call_opening import call_opening
from service.generation.model import Generator
from service.generation.request import Delta, FinishReason, Grammar

STRING = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'  # what JSON allows between quotes
# A call up to its arguments, which templates call `arguments` or, those of Llama 3, `parameters`.
NAMED = re.compile(rf'\s*\{{\s*"name"\s*:\s*("{STRING}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
_OPEN = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "patternProperties", "additionalProperties", "unevaluatedProperties")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Allowed(Protocol):
    @property
    def mode(self) -> str: ...

    @property
    def tools(self) -> Sequence[_Named]: ...


def choose(
    choice: str | NamedTool | FunctionName | _Allowed, functions: Sequence[Function]
) -> tuple[list[dict[str, Any]], "Calling | None"]:
    """Return the tools to show to the model, in the format of templates, and the tool call that is required, or None.

    `choice` is a mode (none, auto or required), a tool that must be called, or the tools that may be called. With mode none, no tool is
    shown. If some tools are allowed, only these are shown.
    """
    named: Sequence[_Named] | None = None
    if isinstance(choice, str):
        mode = choice
    elif isinstance(choice, NamedTool | FunctionName):
        mode, named = "required", [choice]
    else:
        mode, named = choice.mode, choice.tools
    tools = {function.name: function for function in functions}
    if len(tools) < len(functions):
        names = [function.name for function in functions]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise InvalidRequest(f"two tools are called {twice!r}: give each a name of its own", param="tools")
    if mode == "required" and not tools:
        raise InvalidRequest("tool_choice demands a call and there are no tools: send `tools`", param="tool_choice")
    for one in named or ():
        if one.name not in tools:
            raise InvalidRequest(f"tool_choice names {one.name!r}, which is not among the tools: {', '.join(tools)}", param="tool_choice")
    wanted = set(tools if named is None else [one.name for one in named])
    allowed = {name: function for name, function in tools.items() if name in wanted}
    shown = [] if mode == "none" else functions if isinstance(choice, NamedTool | FunctionName) else allowed.values()
    calling = Calling({name: function.parameters for name, function in allowed.items()}) if mode == "required" else None
    return [{"type": "function", "function": each.model_dump(exclude_none=True, exclude={"type"})} for each in shown], calling


@dataclass(frozen=True)
class Calling:
    """The tools that may be called, by name, with the schemas of their arguments."""

    tools: Mapping[str, Mapping[str, Any] | None]

    def grammar(self) -> Grammar:
        schemas = [_closed(parameters) for parameters in self.tools.values()]
        if len(schemas) == 1:
            return json_schema(schemas[0], "tools")
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
        return json_schema({"anyOf": calls, "$defs": defs}, "tools")

    @property
    def only(self) -> str | None:
        """Return the name of the tool if only one may be called, else None."""
        return next(iter(self.tools)) if len(self.tools) == 1 else None

    async def opening(self, model: Generator, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens with which the model's template begins such a call, to be fed after the prompt. `tools` are those shown to
        the model. Empty if the template has no form for calls.
        """
        if (prompts := model.chat_prompts) is None or not prompts.takes_tools:
            return []
        return prompts.encode(await call_opening(prompts, tools, self.only))


class CallBuilder:
    """Builds one tool call from its text while the text arrives."""

    def __init__(self, name: str | None, id: str | None = None) -> None:
        """`name` is the only tool that may be called, and then the text has only its arguments. It is None if there are several tools.

        If `id` is None, the call gets a random id.
        """
        self.id = id or new_id("call_")
        self.name = name
        self.arguments = ""
        self.after = ""  # text after the arguments, if the call is an object with a name
        self._bare = name is not None
        self._held = ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def push(self, text: str) -> str:
        """Add generated text, and return the new part of the arguments."""
        if self.name is None:
            self._held += text
            found = NAMED.match(self._held)
            if found is None:
                return ""
            self.name, text, self._held = json.loads(found[1]), self._held[found.end() :], ""
        new = text if self._bare else self._within(text)
        self.arguments += new
        return new

    @property
    def ended(self) -> bool:
        """Return whether the arguments are complete. It is False for a call whose text has only arguments."""
        return self._depth < 0

    def _within(self, text: str) -> str:
        """Return the part of `text` that belongs to the arguments. The arguments end at the brace that closes their first brace."""
        if self.ended:
            self.after += text
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
                    self._depth, self.after = -1, text[at + 1 :]
                    return text[: at + 1]
        return text

    def json(self) -> dict[str, Any]:
        """Return the call in chat's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name or "", "arguments": self.arguments}}


def finish_reason(delta: Delta) -> FinishReason | Literal["tool_calls"] | None:
    """Return the finish reason of a tool call. It is `tool_calls` if the text ended by itself, not by a stop string."""
    return "tool_calls" if delta.finish_reason == "stop" and delta.stop_reason is None else delta.finish_reason


def _closed(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments. A tool without `parameters` gets the schema of an empty object.

    An object that lists its properties gets `additionalProperties: false`, unless it has one of the keywords `_OPEN`.
    """
    schema = dict(parameters or {"type": "object", "properties": {}})
    if not {"type", "$ref", "anyOf", "allOf", "oneOf"} & set(schema):
        schema["type"] = "object"

    def close(node: dict[str, Any]) -> dict[str, Any]:
        if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not any(name in node for name in _OPEN):
            return {**node, "additionalProperties": False}
        return node

    closed: dict[str, Any] = _each(schema, close)
    return closed


def _moved(schema: dict[str, Any], to: str) -> Any:
    """Return a tool's schema for the position `to` inside the grammar's schema: each local `$ref` gets the prefix `to`."""

    def move(node: dict[str, Any]) -> dict[str, Any]:
        ref = node.get("$ref")
        return {**node, "$ref": to + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else node

    return _each(schema, move)


def _each(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return `value` with `change` applied to every object in it, innermost first. Raises InvalidRequest if it is nested too deeply."""
    try:
        if isinstance(value, dict):
            return change({key: _each(inner, change) for key, inner in value.items()})
        return [_each(inner, change) for inner in value] if isinstance(value, list) else value
    except RecursionError:
        raise InvalidRequest("the parameters of a tool are nested too deeply", param="tools") from None


def arguments_of(text: str) -> Any:
    """Return a call's arguments for templates: the parsed JSON, or the text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
