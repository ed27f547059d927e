"""Finds how a template begins a tool call of the assistant, so that a required call is written in the form that the model was trained with.

A template shows the form only in calls of earlier messages. So an invented conversation with a call is rendered, and the text from the
beginning of the answer to the call's arguments is what the model would write first. Examples: `<tool_call>\\n{"name": "add", "arguments": `
of Qwen, `[TOOL_CALLS][{"name": "add", "arguments": ` of Mistral, `{"name": "add", "parameters": ` of Llama 3.1.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from service.errors import InvalidRequest
from service.generation.chat.prompt import ChatPrompts

_SAID = {"role": "user", "content": "Hello"}
_ID = "call00000"  # nine letters and digits, which templates of Mistral demand


async def call_opening(prompts: ChatPrompts, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """Return the text before a call, as input for `ChatPrompts.encode`: before the arguments of the tool `name` or, if `name` is None,
    before an object `{"name": .., "arguments": ..}`.

    It is empty if the template writes no calls, or writes them in another form. Raises Overloaded as `ChatPrompts.prompt` does.
    """
    mark = f"mark{secrets.token_hex(16)}"  # random, so that no tool has this name
    function = {"name": mark if name is None else name, "arguments": {mark: 0}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
    try:
        opening = await prompts.prompt([_SAID], tools=tools, add_generation_prompt=True)
        rendered = await prompts.prompt([_SAID, call], tools=tools, add_generation_prompt=False)
    except InvalidRequest:
        return ""
    if not rendered.startswith(opening):
        return ""
    arguments = rf'\{{\s*"{mark}"\s*:\s*0\s*\}}'
    whole = arguments if name is not None else rf'\{{\s*"name"\s*:\s*"{mark}"\s*,\s*"arguments"\s*:\s*{arguments}\s*\}}'
    found = re.search(whole, rendered[len(opening) :])
    return "" if found is None else rendered[len(opening) :][: found.start()]
