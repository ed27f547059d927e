"""Builds the events of a streamed response, and numbers them.

`sequence_number` grows, with gaps. It depends only on the number of tokens that the client has after the event. It does not count the
earlier events, because an event contains as many tokens as are ready when it is sent, and this differs between two streams of one
response. So a number means the same in every process, and a client can continue a stream after any event with `starting_after`:

    0 to 4                  created, queued, in_progress, output_item.added, content_part.added
    10 + 5 n                text that ends with token n (counted from 1)
    10 + 5 n + 1            arguments of a tool call that end with token n
    10 + 5 n + 2            an error after token n
    10 + 5 n + 3, n + 4     text in token n + 1 before a tool call that begins in it; output_item.added of this call
    10 + 5 (N + 1) and more all events after the last token N
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from service.dialects.openai.responses.answer import ENDED, Answer, joined
from service.dialects.openai.written_calls import CallReader, content_of
from service.errors import InvalidRequest, ServiceError
from service.http import sse

_FIRST, _STEP = 10, 5
_TEXT, _ARGUMENTS, _ERROR, _TEXT_BEFORE_CALL, _CALL = range(_STEP)
NEVER = -1  # lower than the number of every event: the client has no event yet


def tokens_before(number: int) -> int:
    """Return how many tokens the client has, if the last event that it received has this number."""
    return max(0, (number - _FIRST) // _STEP)


def number_after(n: int, kind: int = 0) -> int:
    """Return the number of an event of this kind (0 to 4) after token n."""
    return _FIRST + _STEP * n + kind


class Events(sse.Script[Answer]):
    """Builds those events of one response whose numbers are greater than `after`. Each piece that it gets is the whole response so far.

    `param`: the header or parameter that `after` comes from. `padded`: whether the sizes of events with new text are rounded up. `ids`:
    whether each event has its number as id, which browsers send as `Last-Event-ID` when they connect again.
    """

    def __init__(
        self, answer: Answer, after: int = NEVER, *, param: str = "starting_after", padded: bool = False, ids: bool = False
    ) -> None:
        self._answer, self._padded = answer, padded
        self._after, self._param, self._ids = after, param, ids
        self._sent = tokens_before(after)  # number of tokens that the client has; a stored response may be behind, and have fewer
        self._reader = answer.reader()
        self._read = 0  # number of tokens that the reader has read
        # If the text may have calls:
        self._first = 0 if answer.required else 1  # output index of the first call
        self._called: list[int] = []  # for each call, the number of characters of its arguments that were sent
        self._told = 0  # number of tokens whose log-probabilities were sent: those before the first call, until the text ends

    def opening(self) -> bytes:
        answer, background = self._answer, self._answer.head["background"]
        said = self._event(0, "created", response=answer.begun("queued" if background else "in_progress"))
        if background:
            said += self._event(1, "queued", response=answer.begun("queued"))
        said += self._event(2, "in_progress", response=answer.begun("in_progress"))
        if not answer.required:  # the item of a tool call is sent later, when the tool's name is known
            item = {"id": answer.item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            said += self._event(3, "output_item.added", output_index=0, item=item)
            said += self._event(4, "content_part.added", **self._place, part=part)
        return said

    def pieces(self, pieces: Sequence[Answer]) -> bytes:
        self._answer = pieces[-1]
        said, before = self._answer.said, self._sent
        if self._reader is not None:
            for _ in self._written(self._reader, min(before, said.count)):  # the client has these events
                pass
        if said.count <= before:  # the stored response is behind the client, or a restarted run computes its tokens again
            return b""
        self._sent = said.count
        if self._reader is not None:
            return b"".join(self._written(self._reader, self._sent))
        text = said.text[said.end(before) : said.end(self._sent)]
        return self._text(number_after(self._sent, _TEXT), text, said.logprobs[before : self._sent])

    def _text(self, number: int, text: str, logprobs: Sequence[bytes]) -> bytes:
        """Return the event with new text, or no bytes if there is neither text nor a log-probability."""
        if not (text or logprobs):
            return b""
        return self._event(number, "output_text.delta", **self._place, delta=text, logprobs=joined(logprobs))

    def _written(self, reader: CallReader, count: int) -> Iterator[bytes]:
        """Read on to token `count`, and yield the events of the tokens read, in which there may be calls. An event ends where text becomes
        a call, or a call the next one, so that its number says which tokens the client has.
        """
        said, text, arguments, logprobs = self._answer.said, "", "", list[bytes]()
        for n in range(self._read + 1, count + 1):
            self._read = n
            parts = reader.push(said.text[said.end(n - 1) : said.end(n)])
            own = content_of(parts)
            if not reader.calls:
                self._told = n
                logprobs += said.logprobs[n - 1 : n]
            for part in parts:
                if isinstance(part, str):
                    text += part
                    continue
                if part.first:
                    yield self._text(number_after(n - 1, _TEXT_BEFORE_CALL if own else _TEXT), text, logprobs)
                    yield self._arguments(number_after(n - 1, _ARGUMENTS), arguments)
                    text, arguments, logprobs = "", "", []
                    self._called.append(0)
                    item = self._answer.call_item(part.call, "in_progress", part.index)
                    yield self._begun(number_after(n - 1, _CALL), part.index, item)
                arguments += part.arguments
        yield self._text(number_after(count, _TEXT), text, logprobs)
        yield self._arguments(number_after(count, _ARGUMENTS), arguments)

    def _arguments(self, number: int, new: str) -> bytes:
        """Return the event with new arguments of the newest call, or no bytes if there are none."""
        if not new:
            return b""
        at = len(self._called) - 1
        self._called[at] += len(new)
        place = {"item_id": self._answer.call_id(at), "output_index": self._first + at}
        return self._event(number, "function_call_arguments.delta", **place, delta=new)

    def _begun(self, number: int, at: int, item: dict[str, Any]) -> bytes:
        """Return the event that begins a call; `at` counts the calls from 0."""
        item = {**item, "status": "in_progress", "arguments": ""}
        return self._event(number, "output_item.added", output_index=self._first + at, item=item)

    def closing(self) -> Iterator[bytes]:
        """Yield the events after the last token: the text that was held back until the end, and the whole response. Raises InvalidRequest
        if `after` is beyond the last event."""
        answer, said = self._answer, self._answer.said
        number = number_after(said.count + 1)
        status = answer.status
        response = answer.response()
        last = self._last(response)
        if status in ("completed", "incomplete"):
            rest = said.text[said.end(said.count) :]
            calls = response["output"][self._first :]
            if not answer.required:
                item, logprobs = response["output"][0], list[bytes]()
                if self._reader is not None:
                    rest, logprobs = content_of([*self._reader.push(rest), *self._reader.end()]), said.logprobs[self._told :]
                yield self._text(number + 1, rest, logprobs)
                (part,) = item["content"]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield from self._event_pieces(number + 2, "output_text.done", **self._place, **done)
                yield from self._event_pieces(number + 3, "content_part.done", **self._place, part=part)
                yield from self._event_pieces(number + 4, "output_item.done", output_index=0, item=item)
            for at, called in enumerate(calls):
                yield from self._written_call(number + 4 * at + 5, at, called)
        yield from self._event_pieces(last, status, response=response)

    def over(self) -> bool:
        """Return whether the response has ended with the event `after`. Raises InvalidRequest if it has ended before it."""
        return self._answer.status in ENDED and self._last(self._answer.response()) == self._after

    def _last(self, response: dict[str, Any]) -> int:
        """Return the number of the last event of the response, which has ended. Raises InvalidRequest if `after` is beyond it."""
        calls = len(response["output"][self._first :]) if response["status"] in ("completed", "incomplete") else 0
        last = number_after(self._answer.said.count + 1) + 4 * calls + 5
        if self._after > last:
            raise InvalidRequest(
                f"{self._param}={self._after} is beyond the last event of this response, which has the number {last}: name {last} or less",
                param=self._param,
            )
        return last

    def _written_call(self, number: int, at: int, item: dict[str, Any]) -> Iterator[bytes]:
        """Yield the rest of the events of a call; `at` counts the calls from 0."""
        index, arguments = self._first + at, item["arguments"]
        if at >= len(self._called):
            self._called.append(0)
            yield self._begun(number, at, item)
        yield self._arguments(number + 1, arguments[self._called[at] :])
        told = {"name": item["name"], "arguments": arguments}
        yield self._event(number + 2, "function_call_arguments.done", item_id=item["id"], output_index=index, **told)
        yield self._event(number + 3, "output_item.done", output_index=index, item=item)

    def failure(self, error: ServiceError) -> bytes:
        """Return the last event of a stream that fails. The response itself may still be generated to its end."""
        content = {"code": error.code, "message": error.message, "param": error.param}
        number = number_after(self._sent, _ERROR)
        return self._id(number) + sse.event({"type": "error", "sequence_number": number, **content}, "error")

    def _id(self, number: int) -> bytes:
        return b"id: %d\n" % number if self._ids else b""

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._answer.item_id, "output_index": 0, "content_index": 0}

    def _event(self, number: int, kind: str, **content: Any) -> bytes:
        return b"".join(self._event_pieces(number, kind, **content))

    def _event_pieces(self, number: int, kind: str, **content: Any) -> Iterator[bytes]:
        if number <= self._after:
            return iter(())
        content = {"type": f"response.{kind}", "sequence_number": number, **content}
        content = sse.padded(content) if self._padded and kind.endswith(".delta") else content
        return chain((self._id(number),), sse.event_pieces(content, f"response.{kind}"))
