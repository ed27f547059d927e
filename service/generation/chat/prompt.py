"""Encodes conversations so that special tokens come only from the template, and everything that a client wrote is plain text.

A template writes `<|im_end|>` at the end of a message. If a client writes these letters inside a message, they must not end the message. So
before the template gets the messages, the first letter of every special token in them is replaced by a stand-in, a code point that ordinary
text does not contain. When the text between the special tokens is tokenised, the stand-ins are replaced by the letters again.

A template can also assemble a special token from parts of the messages, by writing two fields next to each other or by a filter that
changes letters. So the messages are rendered a second time, with stand-ins for every letter with which a special token begins. If the two
renderings have different special tokens, the second rendering is used. In it, the template may not find a text that it searches for in the
messages, but no client can insert a special token.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from service.generation.chat.template import ChatTemplate, Message
from service.tokenization.tokenizer_file import token_ids

_STAND_INS = [*range(0xFDD0, 0xFDF0), *range(0x10F000, 0x10FF00)]  # noncharacters of Unicode, then private-use characters


class ChatPrompts:
    """Makes the chat prompts of one decoder. The tokenizer `texts` encodes the letters of a special token as plain text, and `specials`
    encodes them as the special token.

    If both are the same tokenizer, special tokens in clients' messages take effect.
    """

    def __init__(self, template: ChatTemplate, texts: Tokenizer, specials: Tokenizer) -> None:
        self._template, self._texts, self._specials = template, texts, specials
        added = {} if texts is specials else specials.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items() if token.special and token.content}
        self._special = re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or "$^")
        firsts = sorted({token[0] for token in self._ids})
        self._stand_ins = {ord(letter): chr(stand_in) for letter, stand_in in zip(firsts, _STAND_INS, strict=False)}
        self._letters = {ord(stand_in): chr(letter) for letter, stand_in in self._stand_ins.items()}
        self._stood_in = re.compile(f"[{''.join(self._stand_ins.values())}]" if self._stand_ins else "$^")

    async def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Render the prompt, with stand-ins, for `encode`. Raises what `ChatTemplate.prompt` raises: InvalidRequest and Overloaded."""

        async def rendered(change: Callable[[str], str]) -> str:
            # The arguments of tool calls can contain hundreds of thousands of values, so another thread inserts the stand-ins.
            told, its_tools = await asyncio.to_thread(lambda: (_changed(messages, change), tools and _changed(tools, change)))
            return await self._template.prompt(told, tools=its_tools, add_generation_prompt=add_generation_prompt)

        if not self._ids:
            return await rendered(str)
        begins = False

        def marked(text: str) -> str:
            nonlocal begins
            begins = begins or any(letter in text for letter in self._letters.values())
            return self._special.sub(lambda found: found[0][0].translate(self._stand_ins) + found[0][1:], text)

        prompt = await rendered(marked)
        if begins:
            safe = await rendered(lambda text: text.translate(self._stand_ins))
            if self._special.findall(prompt) != self._special.findall(safe):
                return safe
        return prompt

    @property
    def tells_speakers(self) -> bool:
        """Return whether the template writes who speaks, as those of models do that were trained on conversations."""
        return self._template.tells_speakers

    @property
    def takes_tools(self) -> bool:
        """Return whether the template shows tools to the model."""
        return self._template.takes_tools

    def without_specials(self, prompt: str) -> str:
        """Return a rendered text without its special tokens, as a text of the model has none."""
        return self._special.sub("", prompt)

    def close(self) -> None:
        self._template.close()

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt made by `prompt`. No special tokens are added, because the template has written them."""
        if not self._stood_in.search(prompt):
            return token_ids(self._specials, prompt, add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for found in self._special.finditer(prompt):
            ids += [*self._text(prompt[at : found.start()]), self._ids[found[0]]]
            at = found.end()
        return [*ids, *self._text(prompt[at:])]

    def _text(self, piece: str) -> list[int]:
        return token_ids(self._texts, piece.translate(self._letters), add_special_tokens=False) if piece else []


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to every string in it, names included. Roles come from a fixed list and stay unchanged."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): each if name == "role" else _changed(each, change) for name, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value
