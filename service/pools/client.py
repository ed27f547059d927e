"""The engines of a gateway's encoders. They have the interface of local engines, but a pool of replicas does their work.

If a replica is lost, work that it had not accepted is sent to another replica. Accepted encodings are sent again too, since they have no
side effects. Work is sent again only once, because the request itself may have crashed the replica (`tries.py`).

If a replica rejects work, another replica, which may have capacity, is tried before the client gets an error. Work that no replica
accepts is reported to one replica, because Serve scales the pool by the demand that replicas report.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export import contract
from service.encoding.queue import EncoderLimits
from service.encoding.request import EncodeTask, OnRow, RowOrError
from service.errors import NeverFits, NotReady, Overloaded, QueueTooLong, RuntimeFailed, ServiceError
from service.overload.refusals import RefusedRequests
from service.pools import wire
from service.pools.limits import PART_BYTES
from service.pools.replicas import Replica, ReplicaLost, Replicas
from service.pools.tries import Tries, name_of_request
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.tokenization.texts import Encoded

_PART_INPUTS, _PART_TOKENS = 64, 8192  # most inputs and tokens in one call of a replica, so that a bulk request is spread over the pool


class PoolEngine:
    """The base of engines whose work is done by a pool of replicas."""

    def __init__(self, replicas: Replicas, name: str, fingerprint: str) -> None:
        self._replicas = replicas
        self._name = name
        self._key = (name, fingerprint)
        self._refused_requests = RefusedRequests()

    def start(self) -> None:
        """Do nothing: the replicas start their own engines."""

    async def stop(self) -> None:
        """Do nothing: the replicas stop their own engines."""

    @property
    def healthy(self) -> bool:
        return self._replicas.healthy(self._key)

    @property
    def alive(self) -> bool:
        return True  # always, because this engine has no thread that could end

    @property
    def stuck_s(self) -> float:
        return 0.0

    def refused(self, work: float) -> None:
        """Count tokens or runs that no replica accepted. The next heartbeat reports them to a replica, because Serve scales the pool
        by what replicas report."""
        self._replicas.refused[self._name] += work  # type: ignore[assignment]  # typeshed allows integers only

    def _refuse(self, client: str, content: int, work: float, error: Overloaded) -> None:
        """Count a refused request, unless it was counted before."""
        refuse, now = self._refused_requests.refuse, time.monotonic()
        self.refused(refuse(client, content, now, work, error.retry_after_s, self._replicas.gateways))

    def _admitted(self, client: str, content: int) -> None:
        """Take a request back from the count if it was refused before, because the replica counts it now."""
        if work := self._refused_requests.come_back(client, content, time.monotonic(), self._replicas.gateways):
            self.refused(-work)


class PoolEncoder(PoolEngine):
    """The client of the `EncoderEngine`s on replicas."""

    def __init__(
        self, replicas: Replicas, name: str, fingerprint: str, limits: EncoderLimits, row_bytes: Mapping[str, tuple[int, int]]
    ) -> None:
        """`row_bytes` contains, for each output, the fixed bytes of a row, and the bytes that each token of the row's input adds."""
        super().__init__(replicas, name, fingerprint)
        self.limits = limits  # the limits of one replica
        self._row_bytes = row_bytes

    def check(self, lane: Lane, client: str = "", content: int = 0) -> None:
        """Raise QueueTooLong before a request is tokenised that the replicas have just refused."""
        self._refused_requests.check(client, content, time.monotonic())

    async def run(self, task: EncodeTask) -> list[RowOrError]:
        """Return the rows, as `EncoderEngine.run` does. The inputs are sent to replicas in parts."""
        tokens, limit = task.tokens, self.limits.max_queue_tokens
        if tokens > limit:
            raise NeverFits(f"the request has {tokens} tokens and the queue holds {limit}: send it in parts")
        deadline, on_row = task.deadline, task.on_row
        rows: list[RowOrError] = [NotReady("not computed")] * len(task.inputs)

        async def compute(part: _Part) -> None:
            inputs = wire.pack_inputs(task.inputs[part.first : part.last])
            missing = set(range(part.first, part.last))

            def take(at: int, row: RowOrError) -> None:
                if part.first + at in missing:  # else the row has already arrived, from a replica that was then lost
                    missing.remove(part.first + at)
                    rows[part.first + at] = row
                    if on_row:
                        on_row(part.first + at, row)

            ask = self._by_row if on_row or part.size_bytes > PART_BYTES else self._at_once
            tries = Tries(self._replicas, self._key, lambda: name_of_request(task.client, task.inputs[part.first].ids))
            while True:
                await self._replicas.wait(deadline)
                replica = tries.choose(lambda tried: self._replicas.least(self._key, tried))
                try:
                    async with replica.asked(deadline, part.tokens):
                        found, queue_s, inference_s = await ask(replica, (wire.pack_task(task, inputs), tries.last), take)
                    break
                except ServiceError as error:
                    if not tries.again(replica, error):
                        raise
            for at, row in enumerate(found):
                self._received(replica, at, row, take)
            task.spent.queue_s += queue_s
            task.spent.inference_s += inference_s

        parts, answered = self._parts(task), False
        while parts:
            refusals = await _all([_refusal(compute(each)) for each in parts])
            parts, before = [each for each, refusal in zip(parts, refusals, strict=True) if refusal], len(parts)
            answered |= len(parts) < before
            if len(parts) == before:
                refusal = next(each for each in refusals if each)
                if not answered:
                    self._refuse(task.client, task.content, tokens, refusal)
                    raise refusal
                await asyncio.sleep(refusal.retry_after_s)  # meanwhile the replicas complete other work
        self._admitted(task.client, task.content)
        return rows

    async def probe(self, inputs: Sequence[Encoded], output: str, deadline: float) -> None:
        """Ask the replicas again whether their models are healthy."""
        await self._replicas.ask()

    async def _at_once(self, replica: Replica, message: tuple[Any, ...], take: OnRow) -> tuple[Sequence[RowOrError], float, float]:
        rows, queue_s, inference_s = await self._replicas.pool.call(replica.name, "encode", self._key, *message)
        return rows, queue_s, inference_s

    async def _by_row(self, replica: Replica, message: tuple[Any, ...], take: OnRow) -> tuple[Sequence[RowOrError], float, float]:
        pieces, large, outputs = wire.Pieces(), dict[int, list[Array]](), len(message[0]["outputs"])
        async with contextlib.aclosing(self._replicas.pool.stream(replica.name, "encode_by_row", self._key, *message)) as messages:
            async for kind, *content in messages:
                if kind == "rows":
                    for at, row in content[0]:
                        self._received(replica, at, row, take)
                elif kind == "piece":
                    piece = wire.Piece(*content)
                    if (whole := pieces.join(piece)) is not None:
                        row = large.setdefault(at := piece.array // outputs, [])
                        row.append(whole)
                        if len(row) == outputs:
                            self._received(replica, at, tuple(large.pop(at)), take)
                else:
                    return (), content[0], content[1]
        raise ReplicaLost("the replica ended before its rows were complete: send the request again")

    def _received(self, replica: Replica, at: int, row: RowOrError, take: OnRow) -> None:
        if isinstance(row, RuntimeFailed):
            replica.doubt(self._key)
        take(at, row)

    def _parts(self, task: EncodeTask) -> list["_Part"]:
        """Split the inputs into consecutive parts, each small enough for one call of a replica. A row that is larger than a message arrives
        in pieces.
        """
        sizes = [self._row_bytes[output] for output in task.outputs]
        fixed, by_token = sum(each for each, _ in sizes), sum(each for _, each in sizes)
        parts: list[_Part] = []
        for at, each in enumerate(task.inputs):
            tokens = len(each.ids)
            size_bytes = fixed + by_token * tokens
            last = parts[-1] if parts else None
            if (
                last is None
                or at - last.first == _PART_INPUTS
                or last.tokens + tokens > _PART_TOKENS
                or last.size_bytes + size_bytes > PART_BYTES
            ):
                parts.append(_Part(at, at + 1, tokens, size_bytes))
            else:
                last.last, last.tokens, last.size_bytes = at + 1, last.tokens + tokens, last.size_bytes + size_bytes
        return parts


@dataclass(slots=True)
class _Part:
    """The inputs for one call of a replica: the index of the first input, the index after the last input, the number of tokens in these
    inputs, and the size of their rows in bytes.
    """

    first: int
    last: int
    tokens: int
    size_bytes: int


async def ask_attention(
    replicas: Replicas, key: tuple[str, str], ids: Sequence[int], layers: Sequence[int], deadline: float
) -> list[Array]:
    """Return the attention weights of the layers, computed by any replica. Raises the replica's error, DeadlineExceeded or ReplicaLost."""
    await replicas.wait(deadline)
    replica = replicas.least(key)
    pieces, maps = wire.Pieces(), dict[int, Array]()
    asked = replicas.pool.stream(replica.name, "attention", key, list(ids), list(layers), wire.seconds_left(deadline))
    async with replica.asked(deadline, len(ids)), contextlib.aclosing(asked) as messages:
        async for message in messages:
            piece = wire.Piece(*message)
            if (whole := pieces.join(piece)) is not None:
                maps[piece.array] = whole
    if len(maps) < len(layers):
        raise ReplicaLost("the replica ended before its answer was complete: send the request again")
    return [maps[at] for at in range(len(layers))]


async def _refusal(part: Awaitable[None]) -> QueueTooLong | None:
    """Wait until a part is computed. Returns the error if the part was rejected, else None."""
    try:
        await part
    except QueueTooLong as refusal:
        return refusal
    return None


async def _all(parts: Sequence[Awaitable[QueueTooLong | None]]) -> list[QueueTooLong | None]:
    """Wait for all parts. The first error cancels the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def row_bytes(manifest: contract.Manifest) -> dict[str, tuple[int, int]]:
    """Return, for each output of an encoder's graph, the fixed bytes of a row, and the bytes that each token of the row's input adds."""
    sizes = {}
    for output in manifest.graph.outputs:
        axes = output.shape[1:]
        # A number has 4 bytes; one of a sparse vector has 8 with its index.
        size = (8 if output.name in (contract.SPARSE, contract.TOKEN_WEIGHTS) else 4) * math.prod(
            each for each in axes if isinstance(each, int)
        )
        sizes[output.name] = (0, size) if any(isinstance(axis, str) for axis in axes) else (size, 0)
    return sizes
