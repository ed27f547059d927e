"""The store in a folder after a crash at every write, and after failures of the disk: each call is done as a whole or not at all."""

import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from service.errors import ServiceError, StoreFailed
from service.states.record import IdempotencyKey, NameChange, Quota, Usage
from service.states.sqlite import INLINE_BYTES, SqliteEngine
from service.states.sqlite_schema import COUNT
from tests.service.fakes import first
from tests.service.states.crashing_vfs import RecordingVfs, after_crash
from tests.service.states.sequences import a_record, contents, step


@pytest.fixture
def vfs(request: pytest.FixtureRequest) -> Iterator[RecordingVfs]:
    made = RecordingVfs(f"recording-{request.node.name}")
    yield made
    made.unregister()


def check_whole(folder: Path) -> None:
    """Nothing refers to what is not there, and the sums are right."""
    db = apsw.Connection(str(folder / "states.sqlite3"))
    assert db.pragma("integrity_check") == "ok"
    assert list(db.pragma("foreign_key_check") or []) == []
    assert db.execute("SELECT count(*) FROM names WHERE state NOT IN (SELECT id FROM states WHERE status = 'ready')").get == 0
    assert db.execute("SELECT count(*) FROM states WHERE (blob IS NULL) != (status != 'ready')").get == 0
    assert db.execute("SELECT count(*) FROM blobs b WHERE refs != (SELECT count(*) FROM states WHERE blob = b.id)").get == 0
    kept = db.execute("SELECT * FROM tenants").fetchall()
    db.execute(f"BEGIN; CREATE TEMP TABLE kept AS SELECT * FROM tenants; DELETE FROM tenants; {COUNT} kept t;")
    assert db.execute("SELECT * FROM tenants").fetchall() == kept
    db.execute("ROLLBACK")
    db.close()


def work(engine: SqliteEngine, seed: int, calls: int) -> Iterator[None]:
    """A shuffled use of the store at second 1000; yields after each call, which may also have been refused."""
    chance, made = random.Random(seed), []
    for at in range(1000 * seed, 1000 * seed + calls):
        step(engine, chance, at, made)
        yield


@pytest.mark.parametrize("seed", first(1, [2, 6]))
def test_a_crash_at_any_write_leaves_each_call_done_or_not_begun(vfs: RecordingVfs, tmp_path: Path, seed: int) -> None:
    engine = SqliteEngine(tmp_path / "first", vfs=vfs.name, clock=lambda: 1000.0)
    expected = []
    for number, _ in enumerate(work(engine, seed, 37)):
        if number >= 30:
            vfs.mark(len(expected))
            expected.append(contents(engine))
    assert sum(len(each["states"]) for each in expected[-1].values()) > 4
    assert any(each["documents"] for each in expected[-1].values())
    begin = next(at for at, event in enumerate(vfs.events) if event.kind == "mark")
    for crash in range(begin + 1, len(vfs.events) + 1):
        done = next(event.mark for event in reversed(vfs.events[:crash]) if event.kind == "mark")
        for torn in (None, crash):
            folder = tmp_path / "after"
            after_crash(vfs.events[:crash], folder, seed=torn)
            again = SqliteEngine(folder, clock=lambda: 1000.0)
            assert contents(again) in expected[done : done + 2], f"after {done} calls, crash at {crash}, torn: {torn}"
            check_whole(folder)
            again.close()
            shutil.rmtree(folder)
    engine.close()


@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError], ids=["no space", "i/o error"])
def test_a_failing_disk_fails_one_call_and_harms_nothing(vfs: RecordingVfs, tmp_path: Path, error: type[Exception]) -> None:
    for number in range(1, 300, 11):
        folder = tmp_path / str(number)
        engine = SqliteEngine(folder, vfs=vfs.name, clock=lambda: 1000.0)
        expected, first, failed = contents(engine), vfs._calls, False

        def fails(call: int, last: int = first + number) -> None:
            if call == last:
                raise error("injected")

        vfs.fails = fails
        calls = work(engine, 1, 35)
        try:
            for _ in calls:
                expected = contents(engine)
        except StoreFailed:
            failed = True
        finally:
            vfs.fails = lambda call: None
        assert contents(engine) == expected
        for _ in work(engine, 3, 5):  # it goes on
            expected = contents(engine)
        engine.close()
        again = SqliteEngine(folder, clock=lambda: 1000.0)
        assert contents(again) == expected
        check_whole(folder)
        again.close()
        shutil.rmtree(folder)
        if not failed and vfs._calls < first + number:
            break


class TestFiles:
    """Blobs that are too large for a row."""

    LARGE = bytes(INLINE_BYTES + 1)

    def put(self, engine: SqliteEngine, blob: bytes) -> str:
        return engine.put(a_record(), blob, quota=Quota(states=10, size=10**8)).id

    def files(self, folder: Path) -> list[Path]:
        return [file for file in (folder / "blobs").rglob("*") if file.is_file()]

    def test_a_file_is_synced_and_named_before_its_row_is(self, vfs: RecordingVfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = SqliteEngine(tmp_path, vfs=vfs.name)
        for function in (os.fdatasync, os.fsync):
            monkeypatch.setattr(os, function.__name__, lambda fd, real=function: (vfs.mark(real.__name__), real(fd)))
        del vfs.events[:]
        self.put(engine, self.LARGE)
        kinds = [event.mark or f"{event.kind} {event.file}" for event in vfs.events]
        assert kinds[:3] == ["fdatasync", "fsync", "fsync"]
        assert "write states.sqlite3-wal" in kinds[3:]
        engine.close()

    def test_a_file_without_a_row_is_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = SqliteEngine(tmp_path)
        kept = self.put(engine, self.LARGE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _no_space)
            with pytest.raises(StoreFailed, match="No space left"):
                self.put(engine, self.LARGE[:-1] + b"2")
        assert len(self.files(tmp_path)) == 1
        (tmp_path / "blobs" / "00").mkdir(exist_ok=True)
        (tmp_path / "blobs" / "00" / f"00{'1' * 62}").write_bytes(b"of a crash before the row")
        (tmp_path / "blobs" / "00" / "11.7.part").write_bytes(b"half")
        engine.close()
        engine = SqliteEngine(tmp_path)
        assert len(self.files(tmp_path)) == 1
        assert engine.blob("acme", kept) == self.LARGE
        engine.delete("acme", kept)
        assert self.files(tmp_path) == []
        engine.close()

    @pytest.mark.parametrize("harm", ["flipped", "short", "missing"])
    def test_damaged_bytes_are_set_apart_and_never_given(self, tmp_path: Path, harm: str) -> None:
        engine = SqliteEngine(tmp_path)
        state = self.put(engine, self.LARGE)
        (file,) = self.files(tmp_path)
        content = file.read_bytes()
        if harm == "missing":
            file.unlink()
        else:
            file.write_bytes(b"\1" + content[1:] if harm == "flipped" else self.LARGE[:-1])
        for _ in range(2):
            with pytest.raises(ServiceError, match="damaged") as refusal:
                engine.blob("acme", state)
            assert refusal.value.status == 410
        assert engine.usage("acme").states == 0
        assert len(list((tmp_path / "damaged").glob("*"))) == (harm != "missing")
        engine.close()


def test_waiting_for_another_process_stops_no_thread(tmp_path: Path) -> None:
    engine, other = SqliteEngine(tmp_path), apsw.Connection(str(tmp_path / "states.sqlite3"))
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor() as threads:
        made = threads.submit(TestFiles().put, engine, b"small")
        with pytest.raises(TimeoutError):
            made.result(timeout=0.2)  # it waits; a GIL held for its 10 seconds would keep this thread from ending the transaction
        other.execute("COMMIT")
        assert engine.blob("acme", made.result()) == b"small"
    other.close()
    engine.close()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    SqliteEngine(tmp_path).close()
    db = apsw.Connection(str(tmp_path / "states.sqlite3"))
    db.pragma("user_version", 99)
    db.close()
    with pytest.raises(StoreFailed, match="version 99, and this release reads 3"):
        SqliteEngine(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_an_earlier_version_is_read(tmp_path: Path, version: int) -> None:
    """Version 1 had no floor of the versions of names. Version 2 did not count names, keys, gone states, metadata and token ids."""
    engine, quota = SqliteEngine(tmp_path), Quota(9, 10**6)
    gone = engine.put(a_record(), b"gone", ids=b"ids_", quota=quota)
    kept = engine.put(a_record(parent=gone.id, metadata={"a": "b"}), b"small", ids=b"ids_", quota=quota, key=IdempotencyKey("key", "d")).id
    engine.delete("acme", gone.id)
    engine.close()
    db = apsw.Connection(str(tmp_path / "states.sqlite3"))
    db.execute("DROP INDEX keys_by_tenant; DROP INDEX states_gone_by_tenant; UPDATE tenants SET size = 5")
    for column in ("names", "keys", "gone", "gone_size", "version_floor")[: 5 if version == 1 else 4]:
        db.execute(f"ALTER TABLE tenants DROP COLUMN {column}")
    db.execute("""UPDATE states SET metadata = '{"gone": "too"}' WHERE status != 'ready'""")
    db.pragma("user_version", version)
    db.close()
    for _ in range(2):
        engine = SqliteEngine(tmp_path)
        assert engine.usage("acme") == Usage(1, 5 + 4 + len('"a":"b"'), 0)
        assert [each.record.metadata for each in engine.lineage("acme", kept)] == [{"a": "b"}, {}]
        engine.move("acme", NameChange("doc"), kept)
        engine.close()
        check_whole(tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreFailed, match="file"):
        SqliteEngine(tmp_path / "file")


def _no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")
