"""What a replica of a pool says of itself: to Serve, which replaces and counts replicas, and to gateways."""

import asyncio
from pathlib import Path

import pytest

from service.call import Call
from service.errors import RuntimeFailed, ServiceError
from service.pools import wire
from service.pools.host import Host
from service.settings import Settings
from tests.service.fakes import fake_bundle, fake_catalog
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog
from tests.service.pools.test_client import REQUEST


async def generating() -> tuple[Host, FakeGenerator]:
    model = FakeGenerator("wordy")
    host = Host(FakeGeneratorCatalog([model], Settings(threads=1, stream_interval_s=0)))
    await host.start()
    return host, model


async def test_a_replica_whose_runtime_is_stuck_or_whose_thread_is_dead_fails_its_check() -> None:
    host, model = await generating()
    await host.check_health()
    assert await host.heartbeat() == [("wordy", model.manifest.fingerprint, True)]
    model.engine.stuck_s = 121.0
    with pytest.raises(RuntimeFailed, match=r"a runtime call of wordy has not ended for 121 s, and the most is 120 s"):
        await host.check_health()
    assert await host.heartbeat() == [("wordy", model.manifest.fingerprint, False)]
    model.engine.stuck_s = 0.0
    await host.check_health()
    model.engine.alive = False
    with pytest.raises(RuntimeFailed, match="a runtime thread of wordy is dead"):
        await host.check_health()


async def test_a_generator_that_is_stuck_accepts_nothing() -> None:
    host, model = await generating()
    model.engine.stuck_s = 121.0
    key = (model.name, model.manifest.fingerprint)
    ((kind, error),) = [message async for message in host.generate(key, wire.pack_requests([REQUEST]), "id")]
    assert kind == "failed"
    refusal: ServiceError = wire.unpack_error(error)
    assert (refusal.status, refusal.message.split(" for ")[0]) == (503, "a runtime call of wordy has not ended")
    assert not model.engine.runs


async def test_the_load_of_a_replica_is_that_of_its_busiest_model(tmp_path: Path) -> None:
    """For encoders in seconds: what is queued or runs, at the rate that was measured."""
    catalog = fake_catalog(fake_bundle(tmp_path / "idle"), fake_bundle(tmp_path / "busy"))
    host = Host(catalog)
    await host.start()
    assert host.load() == 0
    session = catalog.session("busy")
    session.hold()
    asking = asyncio.create_task(catalog.get("busy").answer([[5, 6, 7]], Call("id", 0.0)))
    await session.entered(1)
    engine = catalog.computing("busy")
    assert host.load() == engine.load == 3 / engine.tokens_per_s > 0
    session.open()
    await asking
    assert host.load() == 0
    await catalog.stop()
