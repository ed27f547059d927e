"""The replica's side of a pool: serves models to gateways, which get the errors that its methods raise."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from service.call import Call
from service.catalog import Catalog, Served
from service.encoding.model import Model
from service.encoding.request import EncodeTask, RowOrError
from service.errors import NotReady, Overloaded, RuntimeFailed
from service.generation.request import GenerationRequest
from service.generation.runs import Runs
from service.pools import messages, wire
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
        for engine in self._engines.values():
            engine.offered.counts_refusals = False  # because the gateways count refusals
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
        engines = self._engines
        for name in refused.keys() & engines.keys():
            engines[name].refused(refused[name])
        for name, model in self.catalog.models.items():
            if name not in self._probing or self._probing[name].done():
                self._probing[name] = asyncio.create_task(self.catalog.answers(model))
        if engines:
            await asyncio.wait([self._probing[name] for name in engines], timeout=_PROBE_S)
        return len(self._gateways), [
            (
                name,
                model.manifest.fingerprint,
                self._probing[name].done() and self._probing[name].result(),
                *((engine.pending, engine.prompt_token_s, engine.numerics) if name in self.catalog.generators else (0, 0.0, "")),
            )
            for (name, model), engine in zip(self.catalog.models.items(), engines.values(), strict=True)
        ]

    async def encode(self, key: Key, packed: Mapping[str, Any], last: bool) -> tuple[list[RowOrError], float, float]:
        """Encode the inputs of a packed task. Returns the rows, and the seconds that the inputs spent in the queue and in computation,
        summed over the inputs. `last` means that no other replica is asked if this one refuses.
        """
        task = wire.unpack_task(packed)
        return await self._encoded(key, task, last), task.spent.queue_s, task.spent.inference_s

    async def encode_by_row(self, key: Key, packed: Mapping[str, Any], last: bool) -> AsyncIterator[tuple[Any, ...]]:
        """Encode as `encode` does, but send rows before the end. Yields ("rows", [(index, row), ..]) whenever a runtime call ends,
        ("piece", *Piece) for each piece of a row that is larger than a message, and at the end ("spent", seconds, seconds).
        """
        computed: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        task = wire.unpack_task(packed, lambda at, row: computed.put_nowait((at, row)))
        work = asyncio.create_task(self._encoded(key, task, last))
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
            yield "spent", task.spent.queue_s, task.spent.inference_s
        finally:
            work.cancel()

    async def generate(self, key: Key, requests: bytes, session: str, waits: bool = True, last: bool = True) -> AsyncIterator[Any]:
        """Generate texts. When all runs are queued, yields the arithmetic of the engine (see `states/numerics.py`), then messages of
        `messages.py`.

        If `waits` is False and no slot is free, the request is rejected with Overloaded, because another replica may have a free slot. The
        first deltas are sent at once. Later deltas are sent together every `stream_interval_s` seconds or, if many calls are open, less
        often, because every message has a fixed cost.
        """
        runs: Runs | None = None
        asked = wire.unpack_requests(requests)
        with self._pace.stream():
            try:
                model = self._generator(key)
                if not waits and model.engine.full:
                    raise Overloaded("Model is overloaded: no slot of this replica is free", retry_after_s=1.0)
                _check_places(model.engine, asked[0].lane, last)
                runs = await Runs.submit(model, asked, Call(session, time.monotonic()), n=1, prompt_field="prompt", stream=False)
                yield model.engine.numerics
                untold = {at for at, request in enumerate(asked) if request.prompt_logprobs is not None}
                while not runs.done:
                    taken = await runs.take(interval_s=self._pace.interval_s(self.catalog.settings.stream_interval_s))
                    for at in [at for at in untold if len(runs.runs[at].prompt_logprobs) == len(asked[at].prompt)]:
                        untold.remove(at)
                        for part in messages.prompt_parts(at, runs.runs[at].prompt_logprobs):
                            yield part
                    for at, delta in taken:
                        run = runs.runs[at]
                        if run.attention is not None and delta.finish_reason is not None:
                            for weights in messages.attention_parts(at, run.attention):
                                yield weights
                    for deltas in messages.in_deltas([messages.RunDelta.of(at, delta, runs.runs[at].usage) for at, delta in taken]):
                        yield deltas
            except Overloaded as error:
                self._give_up_place(key, asked[0], error, last)
                raise
            finally:
                if runs is not None:
                    runs.close()

    async def attention(self, key: Key, ids: list[int], layers: list[int], left_s: float) -> AsyncIterator[wire.Piece]:
        """Yield the pieces of the attention weights of each layer, shape (H, N, N)."""
        for at, each in enumerate(await self.catalog.attention(self._found(key), ids, layers, wire.deadline_in(left_s))):
            for piece in wire.pieces_of(at, each):
                yield piece

    async def check_health(self) -> None:
        """Raise RuntimeFailed for a failure that only a new process can repair."""
        if reason := self.catalog.sick():
            raise RuntimeFailed(reason)

    def load(self) -> float:
        """Return the work requested since the last call, divided by what this replica can do in that time: see `runtime/offered.py`.

        The encoders share the processor, so their loads are added. Each generator has its own slots, so only the busiest one counts.
        """
        now = time.monotonic()
        loads: dict[str, float] = {name: engine.offered.load(now) for name, engine in self._engines.items()}
        computing = sum(loads[name] for name in self.catalog.encoders)
        holding = max((loads[name] for name in self.catalog.generators), default=0.0)
        return max(computing, holding)

    # ---------------------------------------------------------------------------------------------------------------------------------

    @property
    def _engines(self) -> dict[str, Any]:
        """Return the engine of each model. Engines in this process have more methods than the interface of engines."""
        return {name: model.engine for name, model in self.catalog.models.items()}

    def _described(self, model: Served) -> dict[str, Any]:
        return {"fingerprint": model.manifest.fingerprint, "provider": model.provider, **model.described()}

    def _found(self, key: Key) -> Served:
        name, fingerprint = key
        model = self.catalog.models.get(name)
        if model is None or model.manifest.fingerprint != fingerprint:
            raise NotReady(f"this replica serves another version of model {name}, since models are being exchanged: try again")
        return model

    async def _encoded(self, key: Key, task: EncodeTask, last: bool) -> list[RowOrError]:
        try:
            return await self._encoder(key, task.lane, last).engine.run(task)
        except Overloaded as error:
            self._give_up_place(key, task, error, last)
            raise

    def _give_up_place(self, key: Key, request: EncodeTask | GenerationRequest, error: Overloaded, last: bool) -> None:
        """Give up the place that a refusal has promised, if another replica is asked now. The client would never come for it."""
        if not last:
            self._engines[self._found(key).name].withdraw(request.lane, request.client, error.retry_after_s)

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
