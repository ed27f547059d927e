"""The engines of a gateway's decoders and encoder-decoders, whose runs a pool of replicas computes.

A run that was not accepted by a replica that is lost is sent to another one (`tries.py`). An accepted run ends with an error, after which
`generation/reopening.py` opens it again on another replica.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from service.errors import DeadlineExceeded, NotReady, Overloaded, ServiceError
from service.generation.intake import PromptWork
from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.pools import wire
from service.pools.client import PoolEngine
from service.pools.messages import Receiver
from service.pools.replicas import Key, Replica, ReplicaLost, Replicas
from service.pools.tries import Tries, name_of_request
from service.telemetry.usage import Usage

log = logging.getLogger("attnserve")

_ADMISSION_S = 30.0  # longest time in which a replica must accept a request, including a grammar's compilation


class PoolGenerator(PoolEngine):
    """The client of a `GeneratorEngine` or an `EncoderDecoderEngine` on replicas."""

    def __init__(self, replicas: Replicas, name: str, fingerprint: str) -> None:
        super().__init__(replicas, name, fingerprint)
        self._streams: set[_Stream] = set()
        self._prompt_work = PromptWork(lambda: replicas.prompt_token_s(self._key), self._unfed)

    @property
    def provider(self) -> str:
        """Return the ONNX Runtime provider of one replica. Others may differ: with the setting `auto`, perhaps only some nodes find a
        GPU.
        """
        return str(self._replicas.described[self._name]["provider"])

    def has_numerics(self, numerics: str) -> bool:
        return self._replicas.has_numerics(self._key, numerics)

    def expecting(self, client: str, tokens: float, deadline: float) -> contextlib.AbstractContextManager[None]:
        """See `Generating.expecting`. A gateway knows its own prompts, and assumes that others have as many."""
        return self._prompt_work.expecting(client, tokens, deadline)

    def _unfed(self) -> list[tuple[GenerationRequest, int]]:
        runs = [run for stream in self._streams for run in stream.runs if run.usage.first_token is None]
        return [(run.request, len(run.request.prompt)) for run in runs]

    async def open(self, requests: Sequence[GenerationRequest], key: str) -> list[Run]:
        """Queue the runs and return them, as `GeneratorEngine.open` does. One replica computes all runs of a request and sends them in one
        stream. It is the replica of session `key`, or any replica if `key` is "".
        """
        slots = sum(request.slots for request in requests)
        client, content = requests[0].client, hash(tuple(request.prompt for request in requests))
        stream = _Stream(self._replicas, self._key, requests, key, lambda error: self._refuse(client, content, slots, error))
        await stream.begin()
        self._admitted(client, content)
        self._streams.add(stream)
        stream.following.add_done_callback(lambda _: self._streams.discard(stream))
        return stream.runs

    async def probe(self, deadline: float) -> None:
        """Ask the replicas again whether their models are healthy."""
        await self._replicas.ask()


class _Stream:
    """The runs of one request, fed from one stream of messages. The stream is closed once all runs are closed.

    A replica may still reject an accepted request that has waited too long for its first slot. Then another replica is tried.
    """

    def __init__(
        self, replicas: Replicas, key: Key, requests: Sequence[GenerationRequest], session: str, refused: Callable[[Overloaded], None]
    ) -> None:
        """`refused` is called with the error if no replica queues the runs."""
        self.runs: list[Run] = []
        self._replicas, self._key, self._requests, self._session, self._refused = replicas, key, requests, session, refused
        self._slots = sum(request.slots for request in requests)
        self._movable = key if all(request.takes_known for request in requests) else None  # the model, if another replica can go on
        self._tries = Tries(replicas, key, lambda: name_of_request(requests[0].client, requests[0].prompt))
        self._begun = False  # whether any run has generated a token

    async def begin(self) -> None:
        """Queue the runs on a replica. Raises the errors of `PoolGenerator.open`."""
        try:
            accepted = await self._accepted()
        except Overloaded as error:
            self._refused(error)
            raise
        now = time.monotonic()
        for request in self._requests:
            for _ in range(request.outputs):
                usage = Usage(len(request.prompt), submitted=now, started=now)
                self.runs.append(Run(request, usage, self._leave))
        self._wanted = len(self.runs)
        self._take_place(*accepted)
        self.following = asyncio.create_task(self._follow())

    async def _accepted(self) -> tuple[Replica, AsyncGenerator[Any, None], str]:
        """Find a replica that queues all runs. Returns the replica, the stream of its further messages, and the `numerics` of its engine
        (see `states/numerics.py`).
        """
        latest = time.monotonic() + _ADMISSION_S
        deadline = min(latest, *(request.deadline for request in self._requests))
        numerics = next((request.numerics for request in self._requests if request.numerics), "")
        replicas, tries, session = self._replicas, self._tries, self._session
        choice = partial(replicas.owner, session) if session else replicas.freest
        while True:
            await replicas.wait(deadline)
            replica = tries.choose(lambda tried: choice(self._key, tried, numerics), numerics)
            # This gateway learns of other gateways' runs only from heartbeats, so the chosen replica may be full. Therefore, if there are
            # several replicas, the first one rejects runs that would have to wait for a slot.
            waits = bool(session or tries.tried) or tries.last
            packed = wire.pack_requests(self._requests)  # again for each replica, because it contains the time that is left
            messages = replicas.pool.stream(replica.name, "generate", self._key, packed, session, waits, tries.last)
            try:
                with replica.running(self._key, self._slots):
                    try:
                        async with replica.asked(deadline):
                            numerics_there = await anext(messages)
                    except DeadlineExceeded:
                        if deadline < latest or time.monotonic() < latest:  # the request's own, or an error of the replica
                            raise
                        raise NotReady(f"no replica took the request within {_ADMISSION_S:g} s") from None
                return replica, messages, numerics_there
            except ServiceError as error:
                if not tries.again(replica, error, waits=waits):
                    raise

    def _take_place(self, replica: Replica, messages: AsyncGenerator[Any, None], numerics: str) -> None:
        self._replica, self._messages = replica, messages
        for run in self.runs:
            run.numerics = numerics

    def _leave(self, run: Run) -> None:
        self._wanted -= 1
        if not self._wanted:
            self.following.cancel()

    async def _read(self) -> None:
        receiver = Receiver(self.runs)
        with self._replica.running(self._key, self._slots):
            async with self._replica.asked(movable=self._movable), contextlib.aclosing(self._messages) as messages:
                async for message in messages:
                    self._begun = True
                    receiver.give(message)

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    await self._read()
                    break
                except Overloaded as refusal:
                    if self._begun or not self._tries.again(self._replica, refusal):
                        raise
                    self._take_place(*await self._accepted())
        except Overloaded as refusal:
            self._refused(refusal)
            self._fail(refusal)
        except ServiceError as error:
            self._fail(error)
        except Exception:
            log.exception("a stream from a replica failed")
            self._fail(ServiceError("internal error; the log has it"))
        else:
            self._fail(ReplicaLost("the replica ended the stream before its text was complete: send the request again"))

    def _fail(self, error: ServiceError) -> None:
        for run in self.runs:
            run.fail(error)  # no effect on a run that has ended
