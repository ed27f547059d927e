"""`attnserve states check` finds every damaged blob of any store, and changes nothing."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service import cli
from service.settings import STATES_PASSWORD
from service.states.engine import StateEngine
from service.states.record import Filter, Quota
from service.states.redis import RedisEngine
from service.states.sqlite import INLINE_BYTES, SqliteEngine
from tests.service.states.conftest import PASSWORD, RedisServer
from tests.service.states.sequences import a_record

QUOTA = Quota(states=10, size=10**9)
LARGE = bytes(INLINE_BYTES + 1)


def check(location: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["states", "check", "--states", location])
    return done.exit_code, done.output


def fill(engine: StateEngine) -> None:
    for at, blob in enumerate([b"one", b"two", LARGE]):
        engine.put(a_record(at, tenant=f"tenant {at}"), blob, quota=QUOTA)


def test_every_damaged_blob_of_a_directory_is_listed(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path)
    fill(engine)
    assert check(str(tmp_path)) == (0, "3 blobs read, 0 damaged\n")
    (file,) = (file for file in (tmp_path / "blobs").rglob("*") if file.is_file())
    file.write_bytes(b"\1" + LARGE[1:])
    engine._db.execute("UPDATE blobs SET content = ? WHERE content = ?", (b"eno", b"one"))
    status, output = check(str(tmp_path))
    assert (status, output.count("damaged: "), "3 blobs read, 2 damaged" in output) == (1, 2, True)
    assert f"damaged: {file.name}, {len(LARGE)} bytes, of 1 states" in output
    assert len(engine.page("tenant 0", Filter())) == 1  # nothing was set apart
    engine.close()


def test_every_damaged_blob_of_redis_is_listed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_server.client.flushall()
    monkeypatch.setenv(STATES_PASSWORD, PASSWORD)
    engine = RedisEngine(redis_server.url, password=PASSWORD)
    fill(engine)
    assert check(redis_server.url) == (0, "3 blobs read, 0 damaged\n")
    redis_server.client.delete(redis_server.client.keys("*:blob:*")[0])
    status, output = check(redis_server.url)
    assert (status, output.count("damaged: "), "3 blobs read, 1 damaged" in output) == (1, 1, True)
    engine.close()


def test_a_folder_without_a_store_is_left_as_it_is(tmp_path: Path) -> None:
    status, output = check(str(tmp_path / "none"))
    assert status == 2
    assert "there is no store" in output
    assert list(tmp_path.iterdir()) == []
