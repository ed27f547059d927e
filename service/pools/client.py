"""A gateway's end: engines that stand where local ones would, and have their work done by a pool of replicas.

What is lost with a replica before it was accepted is asked for once more, elsewhere; encodes also after that, since asking twice changes
nothing. A generation that was accepted ends with an error.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from service.admission import EngineLimits
from service.batching import Lane, Spent
from service.engine import NO_DEADLINE
from service.errors import DeadlineExceeded, NeverFits, NotReady, QueueTooLong, RuntimeFailed, ServiceError
from service.generation.request import GenerationRequest, Usage
from service.generation.run import Run
from service.pools import wire
from service.runtime import Array
from service.selftest import SelfTest
from service.tokenization import Encoded
from service.writing.request import WritingRequest

log = logging.getLogger("attnserve")

_HEARTBEAT_S, _SILENCE_S = 1.0, 10.0  # between two questions to a pool; how long it may leave them unanswered
_PART_INPUTS, _PART_TOKENS = 64, 8192  # of what one replica is asked at a time: a bulk request is spread over the pool
_REFUSING_S = 0.05  # a refusal of one replica holds for the pool so long: less than what is queued there by then
_ADMISSION_S = 30.0  # to be accepted by a replica, a grammar's compilation included


class ReplicaLost(NotReady):
    """The replica that had the request is gone."""


class Pool(Protocol):
    """Replicas, any of which may answer. `split.py` has Ray behind it."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """The answer of the replica with the least to do. Ends with its caller. Raises ReplicaLost."""
        ...

    def stream(self, method: str, *arguments: Any, key: str) -> AsyncGenerator[Any, None]:
        """The messages of the replica that `key` belongs to. Closing ends the work there. Raises ReplicaLost."""
        ...


class PoolClient:
    """A pool, its models as it describes them, and whether it answers."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.described: Mapping[str, dict[str, Any]] = {}
        self._healthy: dict[str, bool] = {}
        self._heard = -_SILENCE_S
        self._beating: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Wait until a replica answers, then keep asking."""
        while not self.described:
            await self.describe()
        self._beating = asyncio.create_task(self._beat())

    async def describe(self) -> None:
        """Learn from one of the replicas what it serves, and whether that is healthy."""
        with contextlib.suppress(ReplicaLost):
            self.described = await self.pool.call("describe")
            await self.ask()

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def ask(self) -> None:
        """Whether its models are healthy; silence is remembered as such."""
        with contextlib.suppress(ReplicaLost, TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                self._healthy = await self.pool.call("healthy")
                self._heard = time.monotonic()

    def doubt(self, model: str) -> None:
        """One of its runs has failed: not healthy until it says that it is."""
        self._healthy[model] = False

    def healthy(self, model: str) -> bool:
        return self.answering and self._healthy.get(model, False)

    @property
    def answering(self) -> bool:
        return time.monotonic() - self._heard < _SILENCE_S

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await self.ask()
            except Exception:  # of the way there: silence, whose reason the log has
                log.exception("a pool of replicas could not be asked")

    def check(self) -> None:
        """NotReady where waiting for the pool is of no use."""
        if not self.answering:
            raise NotReady(f"no replica has answered for {_SILENCE_S:g} s; they are being replaced")


_Take = Callable[[int, Array | ServiceError], None]
_Ask = Callable[[tuple[Any, ...], _Take], Awaitable[tuple[Any, ...]]]


class _PoolEngine:
    """What engines of both kinds have in common here."""

    def __init__(self, client: PoolClient, name: str, fingerprint: str) -> None:
        self._client = client
        self._name = name
        self._key = (name, fingerprint)

    def start(self) -> None:
        """The replicas have started theirs."""

    async def stop(self) -> None:
        """The replicas stop theirs."""

    @property
    def healthy(self) -> bool:
        return self._client.healthy(self._name)

    @property
    def alive(self) -> bool:
        return True  # there is no thread here that could die

    @property
    def stuck_s(self) -> float:
        return 0.0

    @property
    def load(self) -> float:
        return 0.0


class PoolEncoder(_PoolEngine):
    """An `EncoderEngine` elsewhere."""

    def __init__(self, client: PoolClient, name: str, fingerprint: str, limits: EngineLimits) -> None:
        super().__init__(client, name, fingerprint)
        self.limits = limits  # of one replica
        self._refused: dict[Lane, tuple[float, QueueTooLong]] = {}  # when a replica last did, and its words

    def check(self, lane: Lane, client: str = "") -> None:
        """As `EncoderEngine.check`: what a replica refused a moment ago is not tokenised here to be refused there."""
        if lane in self._refused:
            at, refusal = self._refused[lane]
            if time.monotonic() - at < min(refusal.retry_after_s, _REFUSING_S):
                raise QueueTooLong(refusal.message, retry_after_s=refusal.retry_after_s)

    async def run(
        self,
        inputs: Sequence[Encoded],
        *,
        output: str,
        lane: Lane = Lane.INTERACTIVE,
        deadline: float = NO_DEADLINE,
        on_result: Callable[[int, Array | ServiceError], None] | None = None,
        spent: Spent | None = None,
        use_cache: bool = True,
        traceparent: str | None = None,
        client: str = "",
    ) -> list[Array | ServiceError]:
        """As `EncoderEngine.run`. Rows arrive part by part."""
        self._client.check()
        tokens, limit = sum(len(each.ids) for each in inputs), self.limits.max_queue_tokens
        if tokens > limit:
            raise NeverFits(f"the request has {tokens} tokens and the queue holds {limit}: send it in parts")
        rows: list[Array | ServiceError] = [NotReady("not computed")] * len(inputs)

        async def part(first: int, last: int) -> None:
            packed = wire.pack_inputs(inputs[first:last])
            arguments = (self._key, packed, output, int(lane), wire.seconds_left(deadline), use_cache, traceparent, client)
            missing = set(range(first, last))

            def take(at: int, row: Array | ServiceError) -> None:
                if first + at in missing:  # else it had come before its replica was lost
                    missing.remove(first + at)
                    rows[first + at] = row
                    if on_result:
                        on_result(first + at, row)

            queue_s, inference_s = await self._asked(self._by_row if on_result else self._at_once, arguments, take, deadline)
            if spent is not None:
                spent.queue_s += queue_s
                spent.inference_s += inference_s

        parts, answered = _parts(inputs), False
        while parts:
            refusals = await _all([_refusal(part(*each)) for each in parts])
            parts, before = [each for each, refusal in zip(parts, refusals, strict=True) if refusal], len(parts)
            answered |= len(parts) < before
            if len(parts) == before:
                refusal = next(each for each in refusals if each)
                self._refused[lane] = time.monotonic(), refusal
                if not answered:
                    raise refusal
                await asyncio.sleep(refusal.retry_after_s)  # what was begun is brought to its end
        return rows

    async def probe(self, inputs: Sequence[Encoded], output: str, deadline: float) -> None:
        """Ask the pool anew."""
        await self._client.ask()

    async def _asked(self, ask: "_Ask", arguments: tuple[Any, ...], take: "_Take", deadline: float) -> tuple[float, float]:
        """Have a replica compute, another if that one is lost; seconds queued and computed."""
        for again in (True, False):
            try:
                async with asyncio.timeout(None if deadline == NO_DEADLINE else max(wire.seconds_left(deadline), 0)):
                    kind, *content = await ask(arguments, take)
                break
            except ReplicaLost:
                if not again:
                    raise
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
        if kind == "refused":
            raise wire.unpack_error(content[0])
        rows, queue_s, inference_s = content
        for at, row in enumerate(wire.unpack_rows(rows)):
            self._received(at, row, take)
        return queue_s, inference_s

    async def _at_once(self, arguments: tuple[Any, ...], take: "_Take") -> tuple[Any, ...]:
        answer: tuple[Any, ...] = await self._client.pool.call("encode", *arguments)
        return answer

    async def _by_row(self, arguments: tuple[Any, ...], take: "_Take") -> tuple[Any, ...]:
        async with contextlib.aclosing(self._client.pool.stream("encode_by_row", *arguments, key="")) as messages:
            async for message in messages:
                if message[0] != "rows":
                    return tuple(message)
                for at, row in message[1]:
                    self._received(at, wire.unpack_rows([row])[0], take)
        raise ReplicaLost("the replica ended before its rows were complete: send the request again")

    def _received(self, at: int, row: Array | ServiceError, take: "_Take") -> None:
        if isinstance(row, RuntimeFailed):
            self._client.doubt(self._name)
        take(at, row)


class PoolGenerator(_PoolEngine):
    """A `GeneratorEngine` or a `WritingEngine` elsewhere."""

    @property
    def provider(self) -> str:
        """As the replica that was asked has it; all are made alike, but `auto` may find a GPU on some nodes only."""
        return str(self._client.described[self._name]["provider"])

    async def open(self, requests: Sequence[GenerationRequest], key: str) -> list[Run]:
        """As `GeneratorEngine.open`: all runs of a request are one stream of one replica, that of `key`."""
        self._client.check()
        for again in (True, False):
            messages = self._client.pool.stream("generate", self._key, wire.pack_requests(requests), key, key=key)
            try:
                async with asyncio.timeout(_ADMISSION_S):
                    first = await anext(messages)
                break
            except ReplicaLost:
                if not again:
                    raise
            except TimeoutError:
                raise NotReady(f"no replica took the request within {_ADMISSION_S:g} s") from None
        if first[0] == "failed":
            raise wire.unpack_error(first[1])
        return _Stream(requests, messages).runs

    async def probe(self, deadline: float) -> None:
        """Ask the pool anew."""
        await self._client.ask()


async def ask_attention(
    client: PoolClient, key: tuple[str, str], ids: Sequence[int], layers: Sequence[int], deadline: float
) -> list[Array]:
    """What layers attend to, from any replica. Raises what the replica does, DeadlineExceeded, ReplicaLost."""
    client.check()
    try:
        async with asyncio.timeout(None if deadline == NO_DEADLINE else max(wire.seconds_left(deadline), 0)):
            kind, content = await client.pool.call("attention", key, list(ids), list(layers), wire.seconds_left(deadline))
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
    if kind == "refused":
        raise wire.unpack_error(content)
    return list(content)


class _Stream:
    """The runs of one request, filled from one stream of messages, which ends when all of them are left."""

    def __init__(self, requests: Sequence[GenerationRequest], messages: AsyncGenerator[Any, None]) -> None:
        now = time.monotonic()
        self.runs = [
            Run(request, Usage(len(request.prompt), submitted=now, started=now), self._leave)
            for request in requests
            for _ in range(request.n if isinstance(request, WritingRequest) else 1)
        ]
        self._wanted = len(self.runs)
        self._messages = messages
        self._following = asyncio.create_task(self._follow())

    def _leave(self, run: Run) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._following.cancel()

    async def _follow(self) -> None:
        try:
            async for kind, *content in self._messages:
                if kind == "made":
                    for made in content[0]:
                        wire.unpack_made(made, self.runs)
                elif kind == "failed":
                    raise wire.unpack_error(content[0])
        except ServiceError as error:
            self._fail(error)
        except Exception:
            log.exception("a stream from a replica failed")
            self._fail(ServiceError("internal error; the log has it"))
        else:
            self._fail(ReplicaLost("the replica ended the stream before its text was complete: send the request again"))

    def _fail(self, error: ServiceError) -> None:
        for run in self.runs:
            run.fail(error)  # which does nothing to who has ended


def _parts(inputs: Sequence[Encoded]) -> list[tuple[int, int]]:
    """Runs of inputs, first and last + 1 of each."""
    parts: list[tuple[int, int]] = []
    first = tokens = 0
    for at, each in enumerate(inputs):
        if at > first and (at - first == _PART_INPUTS or tokens + len(each.ids) > _PART_TOKENS):
            parts.append((first, at))
            first, tokens = at, 0
        tokens += len(each.ids)
    return [*parts, (first, len(inputs))] if inputs else []


async def _refusal(part: Awaitable[None]) -> QueueTooLong | None:
    """What a part was refused with; None when it was computed."""
    try:
        await part
    except QueueTooLong as refusal:
        return refusal
    return None


async def _all(parts: Sequence[Awaitable[QueueTooLong | None]]) -> list[QueueTooLong | None]:
    """What became of each; the first error ends the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def selftest_of(described: Mapping[str, Any]) -> SelfTest:
    return SelfTest(**described["selftest"])


def limits_of(described: Mapping[str, Any]) -> EngineLimits:
    return EngineLimits(**described["limits"])
