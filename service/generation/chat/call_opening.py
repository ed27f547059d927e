"""Finds how a template begins a tool call of the assistant, so that a required call is written in the form that the model was trained with,
and a call that the model writes by itself is recognised.

A template shows the form only in calls of earlier messages. So an invented conversation with a call is rendered, and the text from the
beginning of the answer to the call's arguments is what the model would write first. Examples: `<tool_call>\\n{"name": "add", "arguments": `
of Qwen, `[TOOL_CALLS][{"name": "add", "arguments": ` of Mistral, `{"name": "add", "parameters": ` of Llama 3.1.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from service.errors import InvalidRequest
from service.generation.chat.prompt import ChatPrompts

_SAID = {"role": "user", "content": "Hello"}
_ID = "call00000"  # nine letters and digits, which templates of Mistral demand


async def call_opening(prompts: ChatPrompts, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """Return the text before a call, as input for `ChatPrompts.encode`: before the arguments of the tool `name` or, if `name` is None,
    before an object `{"name": .., "arguments": ..}`.

    It is empty if the template writes no calls, or writes them in another form. Raises Overloaded as `ChatPrompts.prompt` does.
    """
    return await _before_call(prompts, tools, name, "arguments") or ""


_before: WeakKeyDictionary[ChatPrompts, str | None] = WeakKeyDictionary()


async def call_marker(prompts: ChatPrompts, tools: Sequence[Mapping[str, Any]], *, skip_special_tokens: bool) -> str | None:
    """Return the text, such as `<tool_call>`, after which the model writes a call by itself as an object `{"name": .., "arguments": ..}`.

    If it is empty, an answer is a call if it begins with such an object. None: the template writes no calls, or in another form. With
    `skip_special_tokens` it contains no special tokens, as they are not in the text of an answer. Raises Overloaded.
    """
    if prompts not in _before:  # a template has one form for all tools
        _before[prompts] = await _before_call(prompts, tools, None, "(?:arguments|parameters)")
    if (before := _before[prompts]) is None:
        return None
    return (prompts.without_specials(before) if skip_special_tokens else before).strip().rpartition("\n")[2]


async def _before_call(prompts: ChatPrompts, tools: Sequence[Mapping[str, Any]], name: str | None, key: str) -> str | None:
    """Return the text before a call, or None if the template writes none. `key` is a regular expression for the key of the arguments."""
    mark = f"mark{secrets.token_hex(16)}"  # random, so that no tool has this name
    function = {"name": mark if name is None else name, "arguments": {mark: 0}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
    try:
        opening = await prompts.prompt([_SAID], tools=tools, add_generation_prompt=True)
        rendered = await prompts.prompt([_SAID, call], tools=tools, add_generation_prompt=False)
    except InvalidRequest:
        return None
    if not rendered.startswith(opening):
        return None
    arguments = rf'\{{\s*"{mark}"\s*:\s*0\s*\}}'
    whole = arguments if name is not None else rf'\{{\s*"name"\s*:\s*"{mark}"\s*,\s*"{key}"\s*:\s*{arguments}\s*\}}'
    found = re.search(whole, rendered[len(opening) :])
    return None if found is None else rendered[len(opening) :][: found.start()]
