"""Chat templates: the same prompt as `transformers` makes, and no way out of the sandbox or of its bounds."""

import asyncio
import gc
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from service.errors import InvalidRequest, NotReady, ServiceError
from service.generation.chat.template import ChatTemplate
from tests.service.fakes import PATIENCE_S, case, first, until

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


@cache
def made(source: str) -> ChatTemplate:
    """Each has a process of its own, which takes a tenth of a second to start."""
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def newest() -> psutil.Process:
    """The process of the template that was made last."""
    return max(psutil.Process().children(), key=lambda child: (child.create_time(), child.pid))  # pids begin again from 1


@pytest.fixture(autouse=True, scope="module")
def templates() -> Iterator[None]:
    yield
    made.cache_clear()
    gc.collect()


def test_the_prompt_is_that_of_transformers() -> None:
    for source, turns, tools, generation in product([CHATML, LLAMA, TOOLS], [1, 2, 4], [None, [TOOL, TOOL]], [True, False]):
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
        wanted = render_jinja_template([PRECEDENT[:turns]], chat_template=source, bos_token="<s>", eos_token="</s>", **given)[0][0]
        assert made(source).render(PRECEDENT[:turns], **given) == wanted, (source, turns, tools, generation)


def test_a_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    said = [{"role": "developer", "content": "be brief"}]
    assert made(CHATML).render(said).startswith("<|im_start|>system\nbe brief")
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'S' }}{% endfor %}"
    assert made(knows).render(said) == "D"


@pytest.mark.parametrize(("source", "takes"), [(CHATML, False), (TOOLS, True)])
def test_a_template_says_whether_it_takes_tools(source: str, takes: bool) -> None:
    assert made(source).takes_tools is takes


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported") as refused:
        made(LLAMA).render([{"role": "system", "content": "x"}])
    assert refused.value.param == "messages"


def test_what_goes_wrong_inside_is_a_400_and_nothing_gets_out() -> None:
    cases: list[Any] = [
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
    ]
    for source in cases:
        with case(source):
            messages = [{"role": "user", "content": "x"}]
            with pytest.raises(InvalidRequest):
                made(source).render(messages)
            assert messages == [{"role": "user", "content": "x"}]


# Only of more than one message, or no template with it would be served at all.
MANY = "{% if messages | length > 1 %}BODY{% endif %}"
HUNG = {
    "time": "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = messages[0] %}{% endfor %}{% endfor %}",
    "nothing called": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "power": "{{ (messages | length + 1) ** (10 ** 9) }}",
    "filter": "{{ range(99999) | map('string') | join | list | groupby(0) | length }}" * 30,
}
LARGE = {
    "output": "{% for a in range(100000) %}xxxxxxxxxxxxxxxx{% endfor %}",
    "text": "{{ 'x' * (messages | length * 10 ** 10) }}",
    "list": "{{ [1] * (messages | length * 10 ** 10) }}",
    "doubling": "{% set s = namespace(t='xx') %}{% for a in range(64) %}{% set s.t = s.t ~ s.t %}{% endfor %}",
    "width": "{{ messages[0].role | center(10 ** 10) }}",
    "format": "{{ '%*d' | format(10 ** 9, messages | length) }}",
    "indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "lorem": "{{ lipsum(n=10 ** 5, max=1000) | length }}" * 100,
    "depth": "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
}


@pytest.mark.parametrize("body", first(3, [HUNG["time"], LARGE["text"], LARGE["depth"], *HUNG.values(), *LARGE.values()]))
def test_what_takes_too_much_is_stopped_and_the_next_request_is_answered(body: str) -> None:
    template = ChatTemplate(MANY.replace("BODY", body) + "{{ messages[0].content }}", model="tiny", max_characters=100_000, max_s=0.3)
    with pytest.raises(InvalidRequest, match="the chat template of model tiny was stopped: it") as refused:
        template.render([{"role": "user", "content": "x"}] * 2)
    assert len(str(refused.value)) < 200
    assert template.render([{"role": "user", "content": "x"}]) == "x"
    template.close()


@pytest.mark.parametrize(
    "source",
    first(
        2,
        [
            "{{ 'a' * 10 ** 10 }}",
            "{{ 10 ** (10 ** 8) }}",
            "{{ 'a' * 10 ** 9 }}",
            HUNG["nothing called"],
            LARGE["doubling"],
            LARGE["output"],
            "{{ " + "(" * 10_000,
            "{{ " + "-" * 100_000 + "1 }}",
            "{% if true %}" * 5_000 + "{% endif %}" * 5_000,
        ],
    ),
)
def test_a_template_without_an_end_stops_the_start_in_a_sentence(source: str) -> None:
    """Constants are computed as it compiles, in its own process too."""
    with pytest.raises(ValueError, match="the chat template of model tiny ") as refused:
        ChatTemplate(source, model="tiny", max_characters=100_000, max_s=0.3)
    assert len(str(refused.value)) < 300


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    cases: list[Any] = ["{% if %}", "{{ 'a' | nothing_of_this_name }}", "{% include 'x' "]
    for source in cases:
        with case(source), pytest.raises(ValueError, match="does not compile"):
            ChatTemplate(source)


def test_a_template_reads_no_file_and_sees_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that found a way out of Jinja's sandbox could read a key there."""
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "secret")
    template = ChatTemplate("{{ messages[0].content }}")
    child = newest()
    assert "secret" not in str(child.environ())
    assert "ATTNSERVE" not in str(child.environ())
    template.close()
    assert not child.is_running()


def test_its_process_ends_with_the_template_and_with_its_owner() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    child = newest()
    del template
    gc.collect()
    assert not child.is_running()


async def test_one_template_that_takes_long_holds_neither_the_loop_nor_other_templates() -> None:
    slow, quick = ChatTemplate(MANY.replace("BODY", HUNG["nothing called"]), max_s=PATIENCE_S), made(CHATML)
    hanging = asyncio.create_task(slow.prompt([{"role": "user", "content": "x"}] * 2))
    for _ in range(10):
        assert "x" in await quick.prompt([{"role": "user", "content": "x"}])
    assert not hanging.done()
    slow.close()
    with pytest.raises(ServiceError):
        await hanging


def test_a_template_whose_process_was_killed_is_rendered_in_another() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    child = newest()
    child.kill()
    child.wait()
    assert template.render([{"role": "user", "content": "x"}]) == "x"
    template.close()


async def test_a_template_whose_process_is_killed_twice_is_not_the_clients_fault() -> None:
    killed = set(psutil.Process().children())  # of other templates, at first
    template = ChatTemplate(MANY.replace("BODY", HUNG["nothing called"]), max_s=PATIENCE_S)
    hanging = asyncio.create_task(template.prompt([{"role": "user", "content": "x"}] * 2))
    for _ in range(2):
        await until(lambda: {*psutil.Process().children()} - killed or hanging.done())
        for child in {*psutil.Process().children()} - killed:
            child.kill()
            killed.add(child)
    with pytest.raises(NotReady, match="has lost its process: signal 9 ended it"):
        await hanging
    template.close()


def test_the_date_is_todays() -> None:
    assert len(made("{{ strftime_now('%Y-%m-%d') }}").render([])) == 10
