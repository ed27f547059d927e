"""A replica's end: the models of a pool, asked over `wire`. What a caller must be told crosses as an answer, never as an exception."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from service.batching import Lane, Spent
from service.call import Call
from service.catalog import Catalog, Model, Served
from service.dialects.runs import Runs
from service.errors import NotReady, RuntimeFailed, ServiceError
from service.pools import wire

Key = tuple[str, str]  # a model's name and its bundle's fingerprint


class Host:
    """Answers for the models of one catalog, on the event loop that it was started on."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    async def start(self) -> None:
        """Load, test and time every bundle; raises what keeps one from it."""
        await asyncio.to_thread(self.catalog.load)
        self.catalog.start()

    async def describe(self) -> dict[str, dict[str, Any]]:
        """What a gateway tells of each model, in JSON's terms."""
        return {name: self._described(model) for name, model in self.catalog.models.items()}

    async def healthy(self) -> dict[str, bool]:
        """Of each model, whether it answers. One whose last run failed is asked for something short."""
        return {name: await self.catalog.answers(model) for name, model in self.catalog.models.items()}

    async def encode(
        self, key: Key, inputs: list[Any], output: str, lane: int, left_s: float, use_cache: bool, traceparent: str | None, client: str
    ) -> tuple[Any, ...]:
        """("rows", rows, seconds queued, seconds computed) or ("refused", error)."""
        spent = Spent()
        try:
            rows = await self._encoder(key).engine.run(
                wire.unpack_inputs(inputs),
                output=output,
                lane=Lane(lane),
                deadline=wire.deadline_in(left_s),
                spent=spent,
                use_cache=use_cache,
                traceparent=traceparent,
                client=client,
            )
        except ServiceError as error:
            return "refused", wire.pack_error(error)
        return "rows", wire.pack_rows(rows), spent.queue_s, spent.inference_s

    async def encode_by_row(
        self, key: Key, inputs: list[Any], output: str, lane: int, left_s: float, use_cache: bool, traceparent: str | None, client: str
    ) -> AsyncIterator[tuple[Any, ...]]:
        """The same for who has use of a row before all are there: ("rows", [(index, row), ..]) as runs end, then what `encode` gives."""
        there: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        spent = Spent()
        try:
            work = asyncio.create_task(
                self._encoder(key).engine.run(
                    wire.unpack_inputs(inputs),
                    output=output,
                    lane=Lane(lane),
                    deadline=wire.deadline_in(left_s),
                    on_result=lambda at, row: there.put_nowait((at, row)),
                    spent=spent,
                    use_cache=use_cache,
                    traceparent=traceparent,
                    client=client,
                )
            )
        except ServiceError as error:
            yield "refused", wire.pack_error(error)
            return
        work.add_done_callback(lambda done: there.put_nowait(None))
        try:
            ended = False
            while not ended:
                some = [await there.get()]
                while not there.empty():
                    some.append(there.get_nowait())
                ended = some[-1] is None
                if rows := [each for each in some if each is not None]:
                    yield "rows", [(at, wire.pack_rows([row])[0]) for at, row in rows]
            await work
            yield "done", [], spent.queue_s, spent.inference_s
        except ServiceError as error:
            yield "refused", wire.pack_error(error)
        finally:
            work.cancel()

    async def generate(self, key: Key, requests: bytes, request_id: str) -> AsyncIterator[tuple[Any, ...]]:
        """("accepted",) once all runs are queued, then ("made", deltas) as they come, at the end ("ended",); or ("failed", error).

        The first deltas leave at once, what follows is gathered for `stream_interval_s`: a message has its price, however little is in it.
        """
        runs: Runs | None = None
        try:
            asked = wire.unpack_requests(requests)
            runs = await Runs.submit(self._generator(key), asked, Call(request_id, time.monotonic()), n=1, prompt_field="prompt")
            yield ("accepted",)
            begun: set[int] = set()
            while not runs.done:
                made = await runs.take(interval_s=self.catalog.settings.stream_interval_s)
                message = []
                for at, delta in made:
                    run = runs.runs[at]
                    message.append(wire.pack_made(at, delta, run.usage, () if at in begun else run.prompt_logprobs, run.attention))
                    begun.add(at)
                yield "made", message
            yield ("ended",)
        except ServiceError as error:
            yield "failed", wire.pack_error(error)
        finally:
            if runs is not None:
                runs.close()

    async def attention(self, key: Key, ids: list[int], layers: list[int], left_s: float) -> tuple[str, Any]:
        """("maps", [(H, N, N), ..]), a matrix of each head for each of the layers, or ("refused", error)."""
        try:
            return "maps", await self.catalog.attention(self._found(key), ids, layers, wire.deadline_in(left_s))
        except ServiceError as error:
            return "refused", wire.pack_error(error)

    async def check_health(self) -> None:
        """RuntimeFailed for what only another process can mend."""
        if reason := self.catalog.sick():
            raise RuntimeFailed(reason)

    def load(self) -> float:
        """How busy this replica is: 1 is as much as one should have. Encoders: a second of queued tokens; generators: every slot."""
        return max((model.engine.load for model in self.catalog.models.values()), default=0.0)

    # ---------------------------------------------------------------------------------------------------------------------------------

    def _described(self, model: Served) -> dict[str, Any]:
        described: dict[str, Any] = {"fingerprint": model.manifest.fingerprint, "provider": model.provider}
        if isinstance(model, Model):
            selftest = {name: value for name, value in asdict(model.selftest).items() if value is None or math.isfinite(value)}
            described |= {"selftest": selftest, "limits": asdict(model.engine.limits)}
        return described

    def _found(self, key: Key) -> Served:
        name, fingerprint = key
        model = self.catalog.models.get(name)
        if model is None or model.manifest.fingerprint != fingerprint:
            raise NotReady(f"this replica serves another version of model {name}, since models are being exchanged: try again")
        return model

    def _encoder(self, key: Key) -> Model:
        """Also a sick one: its unanswered requests keep others away, where quick refusals would draw them."""
        model = self._found(key)
        assert isinstance(model, Model)
        return model

    def _generator(self, key: Key) -> Any:
        """Not a sick one: what it accepted would end with an error."""
        model = self._found(key)
        self.catalog.check(model)
        return model
