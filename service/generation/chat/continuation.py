"""Renders the next messages of a conversation whose first part is known only as a state.

A template writes whole conversations. So the new messages are rendered after a short conversation that ends like the state: with a message
of the same author whose content is a mark. What follows the mark is what the state must see next.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from service.errors import InvalidRequest
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import Message
from service.states.record import Turn

_SAID = {"role": "user", "content": "Hello"}


async def following(
    prompts: ChatPrompts,
    messages: Sequence[Message],
    *,
    turn: Turn,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return what the template writes after a state that ends with `turn`, for `ChatPrompts.encode`.

    A turn that the model has generated may lack the end that the template gives it, so the result begins with that end; a state that has
    seen it already must not see it again. Every other turn has its end. Raises InvalidRequest and Overloaded as `ChatPrompts.prompt`, and
    InvalidRequest if the template changes or reorders the messages.
    """
    mark = f"mark{secrets.token_hex(16)}"  # a client cannot write it
    role = {"system": "system", "assistant": "assistant", "generated": "assistant"}.get(turn, "user")
    before = [*([_SAID] if role == "assistant" else ()), {"role": role, "content": mark}]
    begin = [_SAID] if turn == "generated" else before  # what the template writes of it must stay the same when messages follow
    opening = await prompts.prompt(begin, tools=tools, add_generation_prompt=False)
    rendered = await prompts.prompt([*before, *messages], tools=tools, add_generation_prompt=add_generation_prompt)
    if rendered.count(mark) != 1 or not rendered.startswith(opening):
        raise _unusable()
    return rendered.partition(mark)[2] if turn == "generated" else rendered.removeprefix(opening)


def _unusable() -> InvalidRequest:
    return InvalidRequest(
        "the chat template of this model does not write messages one after the other, so a state cannot be continued with messages: "
        "send the whole conversation without a state, or the text of the next turn to /v1/completions",
        param="messages",
    )


def turn_of(messages: Sequence[Message]) -> Turn:
    """Return whose message a conversation ends with. A tool's output is shown to the model like a user's message."""
    turns: dict[str, Turn] = {"system": "system", "developer": "system", "assistant": "assistant"}
    return turns.get(str(messages[-1]["role"]), "user")
