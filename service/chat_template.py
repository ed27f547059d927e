"""Messages to a prompt, by the Jinja template that came with a checkpoint.

What a template may use is what `transformers` gives it (`apply_chat_template`): `messages`, `tools`, `add_generation_prompt`, the special
tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls, blocks trimmed. A template is code of whoever made the checkpoint, and
what it works on is a client's: it runs in Jinja's immutable sandbox, with a bound on its output and on its time. The time is looked at
wherever the template calls, looks up, adds or multiplies something; `range` is the sandbox's, with at most 100,000 steps.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.errors import InvalidRequest

MAX_CHARACTERS = 16 * 1024 * 1024
MAX_S = 2.0

Message = Mapping[str, Any]


class ChatTemplate:
    """One template, compiled. `bos_token` and `eos_token` are what it knows under these names."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_characters: int = MAX_CHARACTERS,
        max_s: float = MAX_S,
    ) -> None:
        """ValueError when the template does not compile."""
        environment = _Environment(max_characters, max_s)
        try:
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self.takes_tools = "tools" in variables
        self._knows_developer = "developer" in source
        self._environment = environment
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt, its special tokens written out. InvalidRequest with the template's own words where it refuses the messages.

        `developer` is what OpenAI calls the system's role now: a template that has not heard of it is told `system`.
        """
        known = [message if self._knows_developer else _as_system(message) for message in messages]
        variables = {"messages": known, "tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        self._environment.begin()
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables, **self._tokens):
                size += len(piece)
                self._environment.check_size(size)
                self._environment.check_time()
                pieces.append(piece)
        except _Bound as error:
            raise InvalidRequest(f"the chat template was stopped: {error}; send fewer or shorter messages", param="messages") from None
        except RecursionError:
            raise InvalidRequest("the chat template was stopped: it calls itself too deeply", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # The template's code, on what a client sent: whatever it trips over is in the messages.
            raise InvalidRequest(f"the chat template does not take these messages: {error}", param="messages") from None
        return "".join(pieces)


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


class _Bound(Exception):
    """A template went beyond what it may take."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a clock, one for each thread that renders."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, max_characters: int, max_s: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.max_characters, self.max_s = max_characters, max_s
        self._clock = threading.local()
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def begin(self) -> None:
        self._clock.until = time.monotonic() + self.max_s

    def check_time(self) -> None:
        if time.monotonic() > self._clock.until:
            raise _Bound(f"it took more than {self.max_s:g} s")

    def check_size(self, size: int) -> None:
        if size > self.max_characters:
            raise _Bound(f"its output has more than {self.max_characters} characters")

    def call(self, *arguments: Any, **named: Any) -> Any:
        self.check_time()
        return super().call(*arguments, **named)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Texts, lists and powers are where a few characters become gigabytes."""
        self.check_time()
        if operator == "+" and _long(left) and _long(right):
            self.check_size(len(left) + len(right))
        elif operator == "*" and (_long(left) or _long(right)):
            text, times = (left, right) if _long(left) else (right, left)
            self.check_size(len(text) * times if isinstance(times, int) else 0)
        elif operator == "**" and (abs(right) > 64 or abs(left) > 2**32):
            raise _Bound(f"{left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


def _long(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which no prompt wants. `indent` is bounded: it is multiplied by the depth."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent and min(indent, 16), separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
