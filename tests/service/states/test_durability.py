"""What each store loses with the service, with Redis and with the power, as the table in docs/states.md says."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import StoreFailed
from service.states.engine import StateEngine
from service.states.record import Document, Filter, NameChange, Quota
from service.states.redis import RedisEngine
from service.states.sqlite import SqliteEngine
from tests.service.states.conftest import PASSWORD, RedisServer, redis_server_in
from tests.service.states.sequences import a_record

AMPLE = Quota(states=10**6, size=10**12)
_ENDLESS = "from tests.service.states.test_durability import endless; endless({!r})"


def put(engine: StateEngine) -> str:
    """Keep a state, a name that points to it, and a document, as a stream with durability `turn` does. Return the state's id."""
    record = a_record()
    engine.put(record, record.id.encode(), quota=AMPLE, name=NameChange(record.id))
    engine.write(Document(kind="run", id=record.id, tenant="acme", body=b"{}"), 0, AMPLE)
    return record.id


def kept(engine: StateEngine) -> set[str]:
    """The ids of the states that are there with their bytes, names and documents."""
    found = {each.id for each in engine.page("acme", Filter(limit=10**6))}
    for state in found:
        assert engine.blob("acme", state) == state.encode()
        assert engine.name("acme", state).state == state
    return found & {each.id for each in engine.documents("acme", "run", None, 10**6)}


def opened(location: str) -> StateEngine:
    return RedisEngine(location, password=PASSWORD) if "://" in location else SqliteEngine(Path(location))


def endless(location: str) -> None:
    """The service: says each state that it has acknowledged, until it is killed."""
    engine = opened(location)
    while True:
        print(put(engine), flush=True)


def acknowledged(location: str, most: int) -> list[str]:
    """The states that a service has acknowledged when it is killed after `most` of them, or ends because its store has gone."""
    said = []
    with subprocess.Popen([sys.executable, "-c", _ENDLESS.format(location)], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        for line in service.stdout:
            said.append(line.strip())
            if len(said) == most:
                service.kill()
    return said


@pytest.fixture(params=["folder", "always", "everysec", "none"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    with redis_server_in(tmp_path, appendfsync=None if request.param == "none" else request.param) as server:
        yield server.url


def test_kill_9_of_the_service_takes_nothing_that_was_acknowledged(location: str) -> None:
    said = acknowledged(location, 40)
    assert len(said) >= 40
    engine = opened(location)
    assert set(said) <= kept(engine)
    put(engine)  # it goes on
    engine.close()


@pytest.mark.parametrize("appendfsync", ["always", "everysec", None])
def test_kill_9_of_redis_takes_everything_only_without_an_append_only_file(tmp_path: Path, appendfsync: str | None) -> None:
    with redis_server_in(tmp_path, appendfsync=appendfsync) as server:
        engine = RedisEngine(server.url, password=PASSWORD)
        said = {put(engine) for _ in range(20)}
        if appendfsync == "everysec":  # it may delay a write while an earlier one is being synced
            while server.client.info("persistence")["aof_buffer_length"]:
                pass
        server.kill()
        with pytest.raises(StoreFailed):
            put(engine)
        server.start()
        assert kept(engine) == (said if appendfsync else set())
        assert put(engine) in kept(engine)
        engine.close()


def test_what_redis_has_not_synced_is_lost_in_whole_calls_newest_first(tmp_path: Path) -> None:
    """Power loss with `everysec` cuts the append-only file anywhere after its last sync."""
    with redis_server_in(tmp_path, appendfsync="always") as server:
        engine = RedisEngine(server.url, password=PASSWORD)
        said = [put(engine) for _ in range(6)]
        server.kill()
        (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
        whole, counts = log.read_bytes(), []
        for cut in range(len(whole), len(whole) // 3, -len(whole) // 17):
            log.write_bytes(whole[:cut])
            server.start()
            found = [each.id for each in reversed(engine.page("acme", Filter(limit=100)))]
            assert found == said[: len(found)]
            assert kept(engine) in (set(found), set(found[:-1])), "each state with its name; of the last one the document may be missing"
            assert engine.usage("acme").states == len(found)
            counts.append(len(found))
            server.kill()
        assert counts[0] == 6
        assert counts[-1] < 4
        server.start()
        engine.close()


@pytest.mark.parametrize(
    ("appendfsync", "warning"),
    [
        ("always", None),
        ("everysec", "appendfsync is everysec, and power loss takes what is not synced. Set appendfsync always"),
        (None, "without an append-only file, all of it is lost when Redis ends. Set appendonly yes and appendfsync always"),
    ],
)
def test_a_redis_that_can_lose_states_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, appendfsync: str | None, warning: str | None
) -> None:
    caplog.set_level(logging.WARNING, "attnserve")
    with redis_server_in(tmp_path, appendfsync=appendfsync) as server:
        RedisEngine(server.url, password=PASSWORD).close()
    assert [warning] * (warning is not None) == [re.search(": (.*); docs", each.getMessage())[1] for each in caplog.records]  # type: ignore[index]


def test_a_redis_that_refuses_config_is_used_with_a_warning(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "attnserve")
    redis_server.client.flushall()  # the server is that of other tests too
    redis_server.client.acl_setuser("tenant", enabled=True, passwords=["+other"], keys=["*"], categories=["+@all"], commands=["-config"])
    engine = RedisEngine(redis_server.url.replace("//", "//tenant@"), password="other")
    assert put(engine) in kept(engine)
    (record,) = caplog.records
    assert "refuses CONFIG GET, so its appendfsync is unknown" in record.getMessage()
    engine.close()
