"""A process that compiles and renders one chat template. A template is code, so it may loop forever or fill the memory.

`template.py` runs this file, which imports only Jinja and the standard library. It reads frames from standard input and answers each on
standard output. A frame is a length in eight bytes, then JSON. The first request is {"source", ..}, and each later request contains the
variables of a rendering. An answer is {"takes_tools"}, {"prompt"}, or {"refused"} with the reason. The kernel limits the memory of the
process and the CPU time of each request. A process that ends without an answer has reached a limit. Otherwise the process ends when its
input ends.

A template may use what `transformers` offers in `apply_chat_template`: `messages`, `tools`, `add_generation_prompt`, the special
tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls, trimmed blocks.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASON_CHARACTERS = 1_000  # longest error message of a template in a refusal


class _Refused(Exception):
    """The template does not compile, refused the messages, or reached a limit."""


class Template:
    """One template, compiled in Jinja's immutable sandbox."""

    def __init__(self, *, source: str, tokens: dict[str, str], max_characters: int) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError) as error:
            raise _Refused(f"does not compile: {error}") from error
        except RecursionError:
            raise _Refused("does not compile: it is nested too deeply") from None
        self._tokens, self._max_characters = tokens, max_characters

    def render(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables, **self._tokens):
                size += len(piece)
                if size > self._max_characters:
                    raise _Refused(f"was stopped: its output has more than {self._max_characters} characters")
                pieces.append(piece)
        except RecursionError:
            raise _Refused("was stopped: it calls itself too deeply") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
            # The template's code runs on a client's input, so any error in it is reported as an error of the messages.
            raise _Refused(f"does not take these messages: {error}") from error
        return "".join(pieces)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON. Jinja's own `tojson` escapes HTML characters, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # local time, as in transformers


def main(memory_bytes: int, cpu_s: float) -> None:
    """Answer requests until the input ends. The first request contains the template's source."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(nothing, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    template: Template | None = None

    def compiled(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal template
        template = Template(**question)
        return {"takes_tools": template.takes_tools}

    def rendered(question: dict[str, Any]) -> dict[str, Any]:
        assert template is not None
        return {"prompt": template.render(question)}

    while (question := read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # the kernel sends SIGPROF after `cpu_s` seconds of CPU time, which ends the process
        answer = _answer(compiled if template is None else rendered, question, memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sink, answer)


def _answer(work: Callable[[dict[str, Any]], dict[str, Any]], question: bytes, memory_bytes: int) -> bytes:
    try:
        return json.dumps(work(json.loads(question)), ensure_ascii=False).encode("utf-8", "surrogatepass")
    except _Refused as refused:
        reason = str(refused)[:REASON_CHARACTERS]
    except MemoryError:
        reason = f"was stopped: it needs more than {memory_bytes >> 20} MiB"
    return json.dumps({"refused": reason}).encode()


def read(source: BinaryIO) -> bytes | None:
    """Read the next frame. Returns None at the end of the input."""
    size = source.read(8)
    if len(size) < 8:
        return None
    content = source.read(length := int.from_bytes(size, "big"))
    return content if len(content) == length else None


def write(sink: BinaryIO, content: bytes) -> None:
    sink.write(len(content).to_bytes(8, "big"))
    sink.write(content)
    sink.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
