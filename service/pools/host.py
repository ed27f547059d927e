"""The replica's side of a pool: serves models to gateways through `wire`. Errors for the caller are returned, never raised."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from service.call import Call
from service.catalog import Catalog, Served
from service.encoding.model import Model
from service.encoding.request import EncodeTask
from service.errors import NotReady, Overloaded, RuntimeFailed, ServiceError
from service.generation.request import GenerationRequest
from service.generation.runs import Runs
from service.pools import messages, wire
from service.pools.messages import plain
from service.pools.replicas import SILENCE_S, Key
from service.runtime.lanes import Lane
from service.runtime.pacing import Pace

METHODS = ("describe", "heartbeat", "encode", "encode_by_row", "generate", "attention")  # what gateways may call
_PROBE_S = 0.5


class Host:
    """Serves the models of one catalog, on the event loop on which it was started."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._pace = Pace()
        self._probing: dict[str, asyncio.Task[bool]] = {}
        self._gateways: dict[str, float] = {}  # gateway -> time of its last heartbeat

    async def start(self) -> None:
        """Load, test and time every bundle. Raises the error of the first bundle that fails."""
        await asyncio.to_thread(self.catalog.load)
        for model in self.catalog.models.values():
            model.engine.offered.counts_refusals = False  # because the gateways count refusals
        self.catalog.start()

    async def describe(self) -> dict[str, dict[str, Any]]:
        """Return, for each model, the properties that a gateway needs, as JSON values."""
        return {name: self._described(model) for name, model in self.catalog.models.items()}

    async def heartbeat(self, gateway: str, refused: Mapping[str, float]) -> tuple[int, list[tuple[str, str, bool, int, float, str]]]:
        """Return the number of gateways that send heartbeats, and for each model its name, its bundle's fingerprint, whether it is healthy,
        and for a generator its running and waiting runs, the seconds that a token of a prompt takes, and its arithmetic (see
        `states/numerics.py`). `gateway` names the caller.

        A model whose last run failed is probed with a short input. The heartbeat does not wait long for the probe, because a gateway
        treats a replica that answers late as one that does not respond. `refused` contains, for each model, the tokens or runs that the
        gateway has rejected since its previous heartbeat to any replica.
        """
        now = time.monotonic()
        self._gateways = {name: heard for name, heard in self._gateways.items() if now - heard < SILENCE_S} | {gateway: now}
        for name, work in refused.items():
            if name in self.catalog.models:
                self.catalog.models[name].engine.refused(work)
        names = list(self.catalog.models)
        engines: dict[str, Any] = {name: model.engine for name, model in self.catalog.generators.items()}
        for name in names:
            if name not in self._probing or self._probing[name].done():
                self._probing[name] = asyncio.create_task(self.catalog.answers(self.catalog.models[name]))
        if names:
            await asyncio.wait([self._probing[name] for name in names], timeout=_PROBE_S)
        return len(self._gateways), [
            (
                name,
                model.manifest.fingerprint,
                self._probing[name].done() and self._probing[name].result(),
                engines[name].pending if name in engines else 0,
                engines[name].prompt_token_s if name in engines else 0.0,
                engines[name].numerics if name in engines else "",
            )
            for name, model in self.catalog.models.items()
        ]

    async def encode(self, key: Key, message: tuple[Any, ...], last: bool) -> tuple[Any, ...]:
        """Encode the inputs of an `EncodeMessage`. Returns ("done", *EncodeDone) or ("refused", Refusal). `last` means that no other
        replica is asked if this one refuses.
        """
        task = wire.unpack_task(message)
        try:
            rows = await self._encoder(key, task.lane, last).engine.run(task)
        except ServiceError as error:
            self._give_up_place(key, task, error, last)
            return "refused", wire.pack_error(error)
        return "done", *wire.EncodeDone(wire.pack_rows(rows), task.spent.queue_s, task.spent.inference_s)

    async def encode_by_row(self, key: Key, message: tuple[Any, ...], last: bool) -> AsyncIterator[tuple[Any, ...]]:
        """Encode as `encode` does, but send rows before the end. Yields ("rows", [(index, row), ..]) whenever a runtime call ends,
        ("piece", *Piece) for each piece of a row that is larger than a message, and at the end the result of `encode` without rows.
        """
        computed: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        task = wire.unpack_task(message, lambda at, row: computed.put_nowait((at, row)))
        try:
            work = asyncio.create_task(self._encoder(key, task.lane, last).engine.run(task))
        except ServiceError as error:
            yield "refused", wire.pack_error(error)
            return
        work.add_done_callback(lambda done: computed.put_nowait(None))
        try:
            ended = False
            while not ended:
                some = [await computed.get()]
                while not computed.empty():
                    some.append(computed.get_nowait())
                ended = some[-1] is None
                for sent in wire.rows_in_messages([each for each in some if each is not None]):
                    yield sent
            await work
            yield "done", *wire.EncodeDone([], task.spent.queue_s, task.spent.inference_s)
        except ServiceError as error:
            self._give_up_place(key, task, error, last)
            yield "refused", wire.pack_error(error)
        finally:
            work.cancel()

    async def generate(
        self, key: Key, requests: bytes, session: str, waits: bool = True, last: bool = True
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Generate texts. Yields messages of `messages.py` as plain tuples.

        If `waits` is False and no slot is free, the request is rejected with Overloaded, because another replica may have a free slot. The
        first deltas are sent at once. Later deltas are sent together every `stream_interval_s` seconds or, if many calls are open, less
        often, because every message has a fixed cost.
        """
        runs: Runs | None = None
        asked: list[GenerationRequest] = []
        with self._pace.stream():
            try:
                asked = wire.unpack_requests(requests)
                model = self._generator(key)
                if not waits and model.engine.full:
                    raise Overloaded("Model is overloaded: no slot of this replica is free", retry_after_s=1.0)
                _check_places(model.engine, asked[0].lane, last)
                runs = await Runs.submit(model, asked, Call(session, time.monotonic()), n=1, prompt_field="prompt", stream=False)
                yield plain(messages.Accepted(model.engine.numerics))
                untold = {at for at, request in enumerate(asked) if request.prompt_logprobs is not None}
                while not runs.done:
                    taken = await runs.take(interval_s=self._pace.interval_s(self.catalog.settings.stream_interval_s))
                    for at in [at for at in untold if len(runs.runs[at].prompt_logprobs) == len(asked[at].prompt)]:
                        untold.remove(at)
                        for part in messages.prompt_parts(at, runs.runs[at].prompt_logprobs):
                            yield plain(part)
                    for at, delta in taken:
                        run = runs.runs[at]
                        if run.attention is not None and delta.finish_reason is not None:
                            for weights in messages.attention_parts(at, run.attention):
                                yield plain(weights)
                    for deltas in messages.in_deltas([messages.RunDelta.of(at, delta, runs.runs[at].usage) for at, delta in taken]):
                        yield plain(deltas)
                yield plain(messages.Ended())
            except ServiceError as error:
                if asked:
                    self._give_up_place(key, asked[0], error, last)
                yield plain(messages.Failed(wire.pack_error(error)))
            finally:
                if runs is not None:
                    runs.close()

    async def attention(self, key: Key, ids: list[int], layers: list[int], left_s: float) -> AsyncIterator[tuple[Any, ...]]:
        """Yield ("piece", layer, shape, numbers) for the attention weights of each layer, shape (H, N, N), or ("refused", error)."""
        try:
            maps = await self.catalog.attention(self._found(key), ids, layers, wire.deadline_in(left_s))
        except ServiceError as error:
            yield "refused", wire.pack_error(error)
            return
        for at, each in enumerate(maps):
            for piece in wire.pieces_of(at, each):
                yield "piece", *piece

    async def check_health(self) -> None:
        """Raise RuntimeFailed for a failure that only a new process can repair."""
        if reason := self.catalog.sick():
            raise RuntimeFailed(reason)

    def load(self) -> float:
        """Return the work requested since the last call, divided by what this replica can do in that time: see `runtime/offered.py`.

        The encoders share the processor, so their loads are added. Each generator has its own slots, so only the busiest one counts.
        """
        now = time.monotonic()
        computing = sum(model.engine.offered.load(now) for model in self.catalog.encoders.values())
        holding = max((model.engine.offered.load(now) for model in self.catalog.generators.values()), default=0.0)
        return max(computing, holding)

    # ---------------------------------------------------------------------------------------------------------------------------------

    def _described(self, model: Served) -> dict[str, Any]:
        return {"fingerprint": model.manifest.fingerprint, "provider": model.provider, **model.described()}

    def _found(self, key: Key) -> Served:
        name, fingerprint = key
        model = self.catalog.models.get(name)
        if model is None or model.manifest.fingerprint != fingerprint:
            raise NotReady(f"this replica serves another version of model {name}, since models are being exchanged: try again")
        return model

    def _give_up_place(self, key: Key, request: EncodeTask | GenerationRequest, error: ServiceError, last: bool) -> None:
        """Give up the place that a refusal has promised, if another replica is asked now. The client would never come for it."""
        if isinstance(error, Overloaded) and not last:
            engine: Any = self._found(key).engine
            engine.withdraw(request.lane, request.client, error.retry_after_s)

    def _encoder(self, key: Key, lane: Lane, last: bool) -> Model:
        """Return the encoder, after `_check_places`, even if it has failed or hangs. Its requests then stay pending, and gateways avoid
        replicas with pending requests. If it rejected requests quickly, gateways would send it more.
        """
        model = cast(Model, self._found(key))
        _check_places(model.engine, lane, last)
        return model

    def _generator(self, key: Key) -> Any:
        """Return the generator. Raises NotReady if it has failed or hangs, because accepted runs would end with an error."""
        model = self._found(key)
        self.catalog.check(model)
        return model


def _check_places(engine: Any, lane: Lane, last: bool) -> None:
    """Raise Overloaded if the engine keeps places for clients that were refused, and another replica will be asked. Otherwise requests
    whose place is elsewhere would take these places.
    """
    if not last and engine.keeps_places(lane):
        raise Overloaded("Model is overloaded: this replica keeps places for clients that were refused", retry_after_s=1.0)
