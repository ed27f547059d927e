"""A required tool call begins as the template writes calls of earlier messages."""

import pytest

from service.generation.chat.call_opening import call_opening
from service.generation.chat.prompt import ChatPrompts
from service.generation.chat.template import ChatTemplate
from tests.service.generation_fakes import byte_tokenizer

pytestmark = pytest.mark.asyncio

TOOLS = [{"type": "function", "function": {"name": "add"}}]
TURNS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
LLAMA = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
MISTRAL = """{% if c.id | length != 9 %}{{ raise_exception("ids have 9 letters") }}{% endif %}[TOOL_CALLS][{{ c.function | tojson }}]"""
STRINGS = "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})"
REFUSED = '{{ raise_exception("no calls") }}'


async def opening(call: str, name: str | None, *, turns: str = TURNS) -> str:
    tokenizer = byte_tokenizer()
    texts = byte_tokenizer()
    texts.encode_special_tokens = True
    chat = ChatPrompts(ChatTemplate(turns.replace("CALL", call), bos_token="<s>", eos_token="</s>"), texts, tokenizer)
    try:
        ids = chat.encode(await call_opening(chat, TOOLS, name))
        assert tokenizer.get_vocab()["<s>"] not in ids, "a tool's name is text"
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    finally:
        chat.close()


@pytest.mark.parametrize(
    ("call", "of_one", "of_several"),
    [
        (QWEN, '<tool_call>\n{"name": "add", "arguments": ', "<tool_call>\n"),
        (LLAMA, '{"name": "add", "parameters": ', ""),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": ', "[TOOL_CALLS]["),
        (STRINGS, "", ""),
        (REFUSED, "", ""),
        ("", "", ""),
    ],
    ids=["qwen", "llama", "mistral", "no json", "refused", "no calls"],
)
async def test_a_call_begins_in_the_templates_form(call: str, of_one: str, of_several: str) -> None:
    """Before the arguments of the only tool, or before an object with name and arguments, which the grammar of several tools demands."""
    assert await opening(call, "add") == of_one
    assert await opening(call, None) == of_several


async def test_a_template_that_begins_an_answer_otherwise_has_no_form() -> None:
    """What it writes for a call does not follow the prompt."""
    assert await opening(QWEN, "add", turns=TURNS.replace("<|im_start|>assistant", "<|im_start|>now")) == ""


async def test_a_tools_name_is_text() -> None:
    assert await opening(QWEN, "<s>") == '<tool_call>\n{"name": "<s>", "arguments": '
