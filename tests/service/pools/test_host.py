"""What a replica of a pool says of itself: to Serve, which replaces and counts replicas, and to gateways."""

import asyncio
import time
from pathlib import Path

import pytest

from service.call import Call
from service.encoding.request import EncodeRequest, EncodeTask
from service.errors import NotReady, Overloaded, RuntimeFailed
from service.pools import wire
from service.pools.host import Host
from service.runtime.lanes import Lane
from service.settings import Settings
from service.tokenization.texts import Encoded
from tests.service.fakes import fake_bundle, fake_catalog, until
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog
from tests.service.pools.test_client import REQUEST
from tests.service.scripted_engine import ScriptedEngine


async def generating() -> tuple[Host, FakeGenerator]:
    model = FakeGenerator("wordy")
    host = Host(FakeGeneratorCatalog([model], Settings(threads=1, stream_interval_s=0)))
    await host.start()
    return host, model


async def test_a_replica_whose_runtime_is_stuck_or_whose_thread_is_dead_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    host, model = await generating()
    await host.check_health()
    assert await host.heartbeat("one", {}) == (
        1,
        [("wordy", model.manifest.fingerprint, True, 0, model.engine.prompt_token_s, model.engine.numerics)],
    )
    monkeypatch.setattr(ScriptedEngine, "stuck_s", 121.0)
    with pytest.raises(RuntimeFailed, match=r"a runtime call of wordy has not ended for 121 s, and the most is 120 s"):
        await host.check_health()
    assert await host.heartbeat("other", {}) == (
        2,
        [("wordy", model.manifest.fingerprint, False, 0, model.engine.prompt_token_s, model.engine.numerics)],
    )
    monkeypatch.undo()
    await host.check_health()
    monkeypatch.setattr(ScriptedEngine, "alive", False)
    with pytest.raises(RuntimeFailed, match="a runtime thread of wordy is dead"):
        await host.check_health()


async def test_a_generator_that_is_stuck_accepts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host, model = await generating()
    monkeypatch.setattr(ScriptedEngine, "stuck_s", 121.0)
    key = (model.name, model.manifest.fingerprint)
    with pytest.raises(NotReady, match="a runtime call of wordy has not ended"):
        await anext(host.generate(key, wire.pack_requests([REQUEST]), "id"))
    assert not model.engine.runs


async def test_the_load_of_a_replica_is_that_of_its_encoders_together(tmp_path: Path) -> None:
    """In replicas' worth: tokens that were asked for, at the rate that was measured, over the time in which they were."""
    catalog = fake_catalog(fake_bundle(tmp_path / "one"), fake_bundle(tmp_path / "other"))
    host = Host(catalog)
    await host.start()
    moments = [time.monotonic()]
    assert host.load() == 0
    moments.append(time.monotonic())
    for name in ("one", "other"):
        await catalog.get(name).answer(EncodeRequest(inputs=[[5, 6, 7]]), Call("id", 0.0))
    await host.heartbeat("gateway", {"one": 4.0, "unknown": 5.0})
    worth_s = sum(tokens / catalog.computing(name).tokens_per_s for name, tokens in (("one", 7), ("other", 3)))
    moments.append(time.monotonic())
    load = host.load()
    moments.append(time.monotonic())
    assert worth_s / (moments[3] - moments[0]) <= load <= worth_s / (moments[2] - moments[1])
    assert host.load() == 0
    await catalog.stop()


async def test_only_the_replica_that_is_asked_last_keeps_a_place(tmp_path: Path) -> None:
    """Then it refuses requests for which another replica is asked."""
    catalog = fake_catalog(fake_bundle(tmp_path / "mini"), max_queue_tokens=64)
    host = Host(catalog)
    await host.start()
    model, session, engine = catalog.get("mini"), catalog.session("mini"), catalog.computing("mini")
    key = model.name, model.manifest.fingerprint

    async def encode(token: int, *, last: bool) -> None:
        task = EncodeTask(inputs=[Encoded([token] * 50, None, 50)], outputs=(model.output,), client="10.0.0.1:1")
        await host.encode(key, wire.pack_task(task, wire.pack_inputs(task.inputs)), last)

    session.hold()
    admitted = []
    for number in range(engine.limits.concurrent_runs + 1):
        admitted.append(asyncio.create_task(encode(5 + number, last=True)))
        await until(lambda: engine.queued_tokens == 50 * len(admitted))
        if number < engine.limits.concurrent_runs:
            await session.entered(number + 1)
    with pytest.raises(Overloaded):
        await encode(20, last=False)
    assert not engine.keeps_places(Lane.INTERACTIVE)
    with pytest.raises(Overloaded):
        await encode(20, last=True)
    session.open()
    await asyncio.gather(*admitted)
    with pytest.raises(Overloaded, match="keeps places"):
        await encode(21, last=False)
    await encode(20, last=True)
    await catalog.stop()
