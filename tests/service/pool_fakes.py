"""A pool of replicas in this process: everything between gateway and replica but Ray."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from service.catalog import Catalog
from service.encoding.engine import EncoderEngine
from service.errors import ServiceError
from service.pools.catalog import GatewayCatalog
from service.pools.generators import PoolGenerator
from service.pools.host import Host
from service.pools.wire import pack, unpacker
from service.settings import Settings
from tests.service import fakes
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog


class Loopback:
    """A `service.pools.replicas.Pool` whose replicas are one host. What crosses is copied, and may be of no class of ours."""

    def __init__(self, host: Host, names: tuple[str, ...] = ("one",)) -> None:
        self.host = host
        self.names = names

    def replicas(self) -> tuple[str, ...]:
        return self.names

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        with errors_crossed():
            return crossed(await getattr(self.host, method)(*crossed(arguments)))

    async def stream(self, replica: str, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        messages = getattr(self.host, method)(*crossed(arguments))
        try:
            with errors_crossed():
                async for message in messages:
                    yield crossed(message)
        finally:
            await messages.aclose()


def crossed(value: Any) -> Any:
    """The value, as it arrives elsewhere."""
    reader = unpacker()
    reader.feed(pack(value))
    return reader.unpack()


@contextmanager
def errors_crossed() -> Iterator[None]:
    """Raise a `ServiceError` as it arrives elsewhere."""
    try:
        yield
    except ServiceError as error:
        raise crossed(error) from None


Pool = TypeVar("Pool", bound=Loopback)


async def gateway_of_encoder(folder: Path, make: Callable[[Host], Pool]) -> tuple[GatewayCatalog, Pool]:
    """A gateway that is ready, and its pool of encoders, which serve the bundle `mini`."""
    behind = fakes.fake_catalog(fakes.fake_bundle(folder / "mini"))
    host = Host(behind)
    await host.start()
    pool = make(host)
    gateway = GatewayCatalog(behind.settings, encoders=pool, generators=None)
    await gateway.connect()
    await asyncio.to_thread(gateway.load)
    return gateway, pool


async def stop(gateway: GatewayCatalog, pool: Loopback) -> None:
    await gateway.stop()
    await pool.host.catalog.stop()


class LoopbackGateway(GatewayCatalog):
    """A gateway before one replica, which has the engines of `behind`."""

    def __init__(self, behind: Catalog, pool: Literal["encoders", "generators"]) -> None:
        self.behind = behind
        self._host = Host(behind)
        super().__init__(behind.settings, **{"encoders": None, "generators": None, pool: Loopback(self._host)})

    async def connect(self) -> None:
        await self._host.start()
        await super().connect()

    async def stop(self) -> None:
        await super().stop()
        await self.behind.stop()


class FakeGateway(LoopbackGateway):
    """Before fake sessions; tests hold, break and read those as if they were its own."""

    behind: fakes.FakeCatalog

    def __init__(self, settings: Settings) -> None:
        super().__init__(fakes.FakeCatalog(settings), "encoders")

    def session(self, name: str) -> fakes.FakeSession:
        return self.behind.session(name)

    def computing(self, name: str) -> EncoderEngine:
        return self.behind.computing(name)


class FakeGeneratorGateway(FakeGeneratorCatalog):
    """The same before fake decoders."""

    def __init__(self, generators: Sequence[FakeGenerator], settings: Settings) -> None:
        super().__init__(generators, settings)
        self._host = Host(FakeGeneratorCatalog(generators, settings))
        self._gateway = GatewayCatalog(settings, encoders=None, generators=Loopback(self._host))

    async def connect(self) -> None:
        await self._host.start()
        await self._gateway.connect()

    def load(self) -> None:
        (replicas,) = self._gateway._pools
        for generator in self._generators:
            there = copy.copy(generator)
            there.engine = PoolGenerator(replicas, generator.name, generator.manifest.fingerprint)  # type: ignore[assignment]
            self.models[generator.name] = there  # type: ignore[assignment]
        self.states = self._host.catalog.states

    async def stop(self) -> None:
        await self._gateway.stop()
        await super().stop()
        await asyncio.sleep(0)  # what was cancelled ends
