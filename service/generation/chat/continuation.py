"""Renders the next messages of a conversation whose earlier messages are known only as the decoder's state.

A template can only write whole conversations. So the new messages are rendered after a short, invented conversation. Its last message has
the same author as the last message in the state, and a random mark as its content. The text after the mark is fed to the state.
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
    """Return the text that the template writes after a state that ends with `turn`, as input for `ChatPrompts.encode`.

    If `turn` is "generated", the model wrote the last message, and the state may lack the tokens with which the template ends a message. So
    the returned text begins with this end, and the caller must remove it if the state has seen it. For any other `turn`, the state has seen
    the end, and the returned text begins after it. Raises InvalidRequest and Overloaded as `ChatPrompts.prompt` does, and InvalidRequest if
    the template changes or reorders the messages.
    """
    mark = f"mark{secrets.token_hex(16)}"  # random, so that no client can write it
    role = {"system": "system", "assistant": "assistant", "generated": "assistant"}.get(turn, "user")
    before = [*([_SAID] if role == "assistant" else ()), {"role": role, "content": mark}]
    begin = [_SAID] if turn == "generated" else before  # the template must write these messages the same way when other messages follow
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
    """Return the author of a conversation's last message. A tool's output counts as a user's message, because the model sees it as one."""
    turns: dict[str, Turn] = {"system": "system", "developer": "system", "assistant": "assistant"}
    return turns.get(str(messages[-1]["role"]), "user")
