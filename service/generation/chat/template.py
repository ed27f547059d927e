"""Renders messages to a prompt with the Jinja template of a checkpoint.

A template is code by the author of a checkpoint and works on input from clients. So it is compiled and rendered in a process of its
own (`template_child.py`), whose CPU time and memory the kernel limits. When a template reaches a limit, that request gets an error and
the next request gets a new process. If the process ends for another reason, such as the kernel's lack of memory, the request is
rendered once more in a new process. The template never runs on the event loop.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.errors import InvalidRequest, NotReady, Overloaded
from service.generation.chat import template_child

MAX_CHARACTERS = 16 * 1024 * 1024
MAX_S = 2.0
MEMORY_BYTES = 512 * 1024 * 1024

_PATIENCE_S = 20.0  # an answer may take this many seconds longer than the CPU limit, because other work may slow the process down
_MOST_WAITING = 1_000  # most requests that may wait for one template; rendering takes a fraction of a millisecond
_RETRY_AFTER_S = 1.0
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")  # the only environment variables that the process gets, so it cannot read API keys
_PIECE_BYTES = 1 << 20
_PROBE = [{"role": "user", "content": "Hello"}]

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template. `bos_token` and `eos_token` are variables of the template; `model` is the model's name in errors."""

    def __init__(
        self,
        source: str,
        *,
        model: str = "",
        bos_token: str = "",
        eos_token: str = "",
        max_characters: int = MAX_CHARACTERS,
        max_s: float = MAX_S,
    ) -> None:
        """Compile the template. Raises ValueError if it does not compile, if rendering one short message reaches a limit of time, memory
        or length, or if its process is killed twice.
        """
        self._name = f"the chat template of model {model}" if model else "the chat template"
        self._max_s, self._max_bytes = max_s, 6 * max_characters + _PIECE_BYTES  # a character takes at most six bytes in JSON
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._first = _frame({"source": source, "tokens": tokens, "max_characters": max_characters})
        self._knows_developer = "developer" in source
        self.tells_speakers = "role" in source  # as the templates of models do that were trained on conversations
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._waiting = 0  # requests that wait for the thread; event loop only
        self._lock = threading.Lock()  # held while the child is used
        self._child: _Child | None = None
        try:
            self.takes_tools = bool(self._ask(None)["takes_tools"])
            self._ask(_frame(self._variables(_PROBE, None, True)))
        except (_Refused, _Killed) as refused:
            # A template may refuse the message of this test, as it may refuse any message. Every other failure stops the start.
            if not str(refused).startswith("does not take"):
                self.close()
                raise ValueError(f"{self._name} {refused}") from None

    async def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Call `render` on the template's own thread. Raises Overloaded if too many requests wait for it."""
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(f"{self._waiting} requests wait for {self._name}, which is the most", retry_after_s=_RETRY_AFTER_S)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            )
        finally:
            self._waiting -= 1

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt with special tokens as text. Blocks. Raises InvalidRequest if the template refuses the messages, and NotReady
        if its process was killed twice.

        OpenAI's API now calls the system role `developer`. A template whose source does not contain this word gets the role `system`.
        """
        try:
            prompt: str = self._ask(_frame(self._variables(messages, tools, add_generation_prompt)))["prompt"]
        except _Refused as refused:
            advice = "; send fewer or shorter messages" if str(refused).startswith("was stopped") else ""
            raise InvalidRequest(f"{self._name} {refused}{advice}", param="messages") from None
        except _Killed as killed:
            raise NotReady(f"{self._name} {killed}; send the request again") from None
        return prompt

    def close(self) -> None:
        """End the process. A rendering in progress fails; a later rendering starts another process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with self._lock:  # wait until no other thread uses the connection
                child.end()

    def _variables(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool) -> Any:
        known = [message if self._knows_developer else _as_system(message) for message in messages]
        return {"messages": known, "tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}

    def _ask(self, question: bytes | None) -> dict[str, Any]:
        """Send a frame to the process and return the answer. If the frame is None, only compile. Starts a process if needed. If the process
        is killed, asks a new process once. Raises _Refused, or _Killed if the new process is killed too.
        """
        with self._lock:
            try:
                return self._ask_once(question)
            except _Killed:
                if self._child is None:  # `close` has killed it
                    raise
                return self._ask_once(question)

    def _ask_once(self, question: bytes | None) -> dict[str, Any]:
        child = self._child
        if child is None or child.ended:
            child = self._child = _Child(self._max_s, self._max_bytes)
            first = child.ask(self._first)
            if question is None:
                return first
        assert question is not None
        return child.ask(question)


class _Refused(Exception):
    """The template returned no prompt. The error's message completes a sentence that begins with "the template"."""


class _Killed(Exception):
    """The template's process was ended from outside, or got too little CPU time. The message is as in `_Refused`."""


class _Child:
    """The process of one template. Only one thread may use it at a time."""

    def __init__(self, max_s: float, max_bytes: int) -> None:
        self.ended = False
        self._max_s, self._max_bytes = max_s, max_bytes
        self._socket, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(template_child.__file__)), str(MEMORY_BYTES), str(max_s)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # so Ctrl-C reaches only the service, which finishes accepted requests
            )
        # Ends the process also if `close` is never called: at exit, or by the garbage collector.
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)

    def ask(self, frame: bytes) -> dict[str, Any]:
        """Send a frame and return its answer. Raises _Refused if the process refuses or reaches a limit, and _Killed if it ends for another
        reason or takes too long.
        """
        until = time.monotonic() + self._max_s + _PATIENCE_S
        try:
            self._socket.settimeout(self._max_s + _PATIENCE_S)
            self._socket.sendall(frame)
            size = int.from_bytes(self._receive(8, until), "big")
            if size > self._max_bytes:
                raise OSError
            answer: dict[str, Any] = json.loads(self._receive(size, until))
        except OSError:  # TimeoutError too
            self.end()
            raise self._cause() from None
        if (reason := answer.get("refused")) is not None:
            raise _Refused(reason)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.ended = True
        self._finalizer()

    def _cause(self) -> _Refused | _Killed:
        """Return the error for a process that ended without an answer. SIGPROF means that it reached its CPU limit. Python ends with a
        positive status, SIGSEGV or SIGABRT if it reaches its memory limit outside the template's code. No limit sends other signals.
        """
        status = self._process.returncode
        if status == -signal.SIGPROF:
            return _Refused(f"was stopped: it took more than {self._max_s:g} s")
        if status > 0 or status in (-signal.SIGSEGV, -signal.SIGABRT):
            return _Refused(f"was stopped: it needs more than {MEMORY_BYTES >> 20} MiB")
        return _Killed(f"has lost its process: signal {-status} ended it, or it got no CPU time")

    def _receive(self, size: int, until: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            if not (piece := self._socket.recv(min(size - len(content), _PIECE_BYTES))):
                raise ConnectionResetError
            content += piece
        return bytes(content)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Close the connection and end the process. A process that has already ended by itself keeps its exit status."""
    connection.close()
    try:
        process.wait(timeout=0.05)  # a short wait, because it may be about to end by itself
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _frame(content: Any) -> bytes:
    encoded = json.dumps(content).encode()
    return len(encoded).to_bytes(8, "big") + encoded


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message
