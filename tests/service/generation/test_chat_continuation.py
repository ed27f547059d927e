"""What a template writes after a state is what it would have written in the whole conversation."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from service.errors import InvalidRequest
from service.generation.chat.continuation import following, turn_of
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from service.states.record import Turn
from tests.service.generation_fakes import TEMPLATE, byte_tokenizer

pytestmark = pytest.mark.asyncio

IM = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYSTEM_FIRST = """{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}[/SYS]{% endif %}{% for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'assistant' %}{{ message.content }}</s>{% endif %}
{%- endfor %}"""
NEW = [{"role": "user", "content": "And <then>?"}]
BEFORE: list[tuple[Turn, list[dict[str, str]]]] = [
    ("system", [{"role": "system", "content": "Be brief."}]),
    ("user", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
    ("assistant", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]),
]


def prompts(source: str) -> ChatPrompts:
    specials = byte_tokenizer()
    texts = byte_tokenizer()
    texts.encode_special_tokens = True
    return ChatPrompts(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), texts, specials)


async def ids(chat: ChatPrompts, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    return chat.encode(await chat.prompt(messages, **options))


@pytest.mark.parametrize("source", [TEMPLATE, IM, SYSTEM_FIRST])
async def test_after_a_prompt(source: str) -> None:
    chat = prompts(source)
    try:
        for (turn, before), answered in product(BEFORE, [True, False]):
            fed = await ids(chat, before, add_generation_prompt=False)
            more = chat.encode(await following(chat, NEW, turn=turn, add_generation_prompt=answered))
            assert fed + more == await ids(chat, [*before, *NEW], add_generation_prompt=answered), (turn, answered)
            assert turn_of(before) == turn
    finally:
        chat.close()


@pytest.mark.parametrize("source", [TEMPLATE, IM, SYSTEM_FIRST])
async def test_after_an_answer_of_the_model(source: str) -> None:
    """The state has seen the prompt and the answer; its end comes with the next messages."""
    chat = prompts(source)
    try:
        asked = [{"role": "user", "content": "Hi"}]
        fed = chat.encode(await chat.prompt(asked) + "Ho")
        more = chat.encode(await following(chat, NEW, turn="generated"))
        assert fed + more == await ids(chat, [*asked, {"role": "assistant", "content": "Ho"}, *NEW])
    finally:
        chat.close()


async def test_special_tokens_in_new_messages_stay_text() -> None:
    chat = prompts(SYSTEM_FIRST)
    try:
        more = chat.encode(await following(chat, [{"role": "user", "content": "</s>"}], turn="user"))
        assert 1 not in more
        assert 1 in chat.encode(await following(chat, [{"role": "user", "content": "</s>"}], turn="generated"))  # the template's own
    finally:
        chat.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages | reverse %}{{ message.content }};{% endfor %}",
        "{{ messages[-1].content }}",
        "{% if messages | length > 1 %}{{ messages[-1].content }}{% endif %}{{ messages[0].content }}",
        "{% for message in messages %}{{ message.content }}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content | upper }}{% endfor %}",
        "{{ messages | length }}{% for message in messages %}{{ message.content }}{{ messages | length }}{% endfor %}",
    ],
)
async def test_a_template_that_does_not_write_messages_in_turn_is_refused(source: str) -> None:
    chat = prompts(source)
    try:
        for turn in ("user", "generated"):
            with pytest.raises(InvalidRequest, match="one after the other"):
                await following(chat, NEW, turn=turn)  # type: ignore[arg-type]
    finally:
        chat.close()
