"""Chat templates: the same prompt as `transformers` makes, and no way out of the sandbox or of its bounds."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from service.chat_template import ChatTemplate
from service.errors import InvalidRequest

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] | trim }} [/INST]
{% elif message['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% else %}
 {{ message['content'] }}{{ eos_token }}
{% endif %}
{% endfor %}"""
TOOLS = """{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{% if not loop.last %}, {% endif %}{% endfor %}
{%- endif %}
{%- set state = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set state.n = state.n + 1 %}
{{ state.n }}. {{ message.role }}: {{ message.content }}
{%- endfor %}"""
PRECEDENT = [
    {"role": "user", "content": "  Hi <b>you</b> & 'me'\n"},
    {"role": "assistant", "content": "Hello! 日本 👋"},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & é", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("source", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
@pytest.mark.parametrize("generation", [True, False])
def test_the_prompt_is_that_of_transformers(source: str, turns: int, tools: Any, generation: bool) -> None:
    messages = PRECEDENT[:turns]
    given: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
    wanted = render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>", **given)[0][0]
    assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **given) == wanted


def test_what_a_client_writes_is_text_and_no_template() -> None:
    assert "{{ 7 * 7 }}" in ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}"}])


def test_a_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    said = [{"role": "developer", "content": "be brief"}]
    assert ChatTemplate(CHATML).render(said).startswith("<|im_start|>system\nbe brief")
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'S' }}{% endfor %}"
    assert ChatTemplate(knows).render(said) == "D"


@pytest.mark.parametrize(("source", "takes"), [(CHATML, False), (TOOLS, True)])
def test_a_template_says_whether_it_takes_tools(source: str, takes: bool) -> None:
    assert ChatTemplate(source).takes_tools is takes


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported") as refused:
        ChatTemplate(LLAMA).render([{"role": "system", "content": "x"}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0] > 1 }}",
        "{{ 'x'.encode('nowhere') }}",
        "{{ [].__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].clear() }}",
    ],
)
def test_what_goes_wrong_inside_is_a_400_and_nothing_gets_out(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}xxxxxxxxxxxxxxxx{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set s = namespace(t='xx') %}{% for a in range(64) %}{% set s.t = s.t + s.t %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = messages[0] %}{% endfor %}{% endfor %}",
        "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
    ],
    ids=["output", "text", "list", "power", "doubling", "time", "depth"],
)
def test_output_and_time_are_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest, match="was stopped"):
        ChatTemplate(source, max_characters=100_000, max_s=0.2).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' | nothing_of_this_name }}", "{% include 'x' "])
def test_a_template_that_does_not_compile_stops_the_start(source: str) -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate(source)


def test_the_date_is_todays() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])) == 10
