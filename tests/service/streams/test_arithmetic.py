"""Streams before generators on processors of two kinds: each continues where its own tokens can be drawn again."""

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from service.app import build_app
from service.pools.generators import PoolGenerator
from service.pools.host import Host
from service.pools.replicas import Replicas
from service.settings import Settings
from service.states.store import Store
from service.streams.record import RUN_KIND, RunStart, unpack
from tests.service.fakes import PATIENCE_S, client
from tests.service.generation_fakes import FakeGeneratorCatalog
from tests.service.pool_fakes import Loopback
from tests.service.stream_fakes import Answer, Event, RealGenerator, StoringCatalog, parsed
from tests.service.streams.open_streams import BODY, PATH, document, held, texts, written

SETTINGS = Settings(threads=1, stream_interval_s=0)
OURS = ("ours", "ours too", "ours as well")


class TwoKinds(Loopback):
    """Four generators, of which `theirs` computes with another arithmetic. It describes the models: others are asked only if it is gone."""

    def __init__(self, ours: Host, theirs: Host) -> None:
        super().__init__(ours, ("theirs", *OURS))
        self.hosts = {"theirs": theirs, **dict.fromkeys(OURS, ours)}
        self.opened: list[str] = []

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        return await Loopback(self.hosts[replica]).call(replica, method, *arguments)

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.opened.append(replica)
        async for message in Loopback(self.hosts[replica]).stream(replica, method, *arguments):
            yield message


class TwoKindsCatalog(StoringCatalog):
    """A gateway before them."""

    def __init__(self, tokenizer: Path, store: Store) -> None:
        self.ours, self.theirs = RealGenerator(tokenizer), RealGenerator(tokenizer, numerics="elsewhere")
        super().__init__([self.ours], SETTINGS, store)
        self.behind = [FakeGeneratorCatalog([model], SETTINGS) for model in (self.ours, self.theirs)]
        self.pool = TwoKinds(*map(Host, self.behind))
        self.replicas = Replicas(self.pool)

    async def connect(self) -> None:
        for host in set(self.pool.hosts.values()):
            await host.start()
        await self.replicas.connect()

    def load(self) -> None:
        super().load()
        there = copy.copy(self.ours)
        there.engine = PoolGenerator(self.replicas, there.name, there.manifest.fingerprint)  # type: ignore[assignment]
        self.models[there.name] = there  # type: ignore[assignment]

    async def stop(self) -> None:
        await self.replicas.stop()
        await super().stop()
        for each in self.behind:
            await each.stop()


@asynccontextmanager
async def two_kinds(tokenizer: Path, store: Store) -> AsyncIterator[tuple[httpx.AsyncClient, TwoKindsCatalog]]:
    catalog = TwoKindsCatalog(tokenizer, store)
    app = build_app(catalog)
    app.state.catalog = catalog
    async with asyncio.timeout(PATIENCE_S), client(app) as http:
        http.app = app  # type: ignore[attr-defined]
        yield http, catalog


async def begun(http: httpx.AsyncClient, catalog: TwoKindsCatalog, *names: str) -> tuple[str, list[Event]]:
    """A whole stream of one of these generators, and the id of its run. Afterwards all four are there again."""
    everyone, catalog.pool.names = catalog.pool.names, names
    await catalog.replicas.ask()
    answer = await http.post(PATH, json=BODY)
    catalog.pool.names = everyone
    await catalog.replicas.ask()
    return answer.headers["x-run-id"], parsed(answer.text)


async def start_of(store: Store, run: str) -> RunStart:
    await written(store)
    found = await document(store, run, RUN_KIND)
    return unpack(run, "", found.body, b"")[0]


async def test_a_stream_is_stored_with_the_arithmetic_of_its_own_run(tokenizer: Path, store: Store) -> None:
    async with two_kinds(tokenizer, store) as (http, catalog):
        for names, model, numerics in ((OURS, catalog.ours, "here"), (("theirs",), catalog.theirs, "elsewhere")):
            catalog.pool.names, http.model = names, model  # type: ignore[attr-defined]
            await catalog.replicas.ask()
            async with held(http) as stream:  # before its tokens are stored
                assert (await start_of(store, stream.run)).numerics == numerics


async def test_a_stream_goes_on_where_its_tokens_can_be_drawn_again(tokenizer: Path, store: Store) -> None:
    """Also for a client that sends no hash, and however its generators are chosen."""
    async with two_kinds(tokenizer, store) as (http, catalog):
        for names in (("theirs",), OURS):
            run, events = await begun(http, catalog, *names)
            whole = texts(Answer.of(events))[0]
            for session in range(8):
                catalog.pool.opened.clear()
                answer = await http.get(f"/v1/stream/{run}?from=5", headers={"x-session-id": f"session-{session}"})
                rest = texts(Answer.of(parsed(answer.text)))[0]
                assert whole["text"].endswith(rest["text"])
                assert 0 < len(rest["text"]) < len(whole["text"])
                (asked,) = catalog.pool.opened
                assert asked in names
