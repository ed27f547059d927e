"""A store in a folder whose disk is full, or whose files are taken from it while it is open."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from service.errors import StoreFailed, StoreFull
from service.states.engine import StateEngine
from service.states.record import Filter, Quota
from service.states.sqlite import INLINE_BYTES, SqliteEngine
from service.states.store import Store
from service.telemetry.metrics import Metrics
from service.telemetry.state_store_metrics import StateStoreMetrics
from tests.service.fakes import PATIENCE_S
from tests.service.states.sequences import a_record

T = TypeVar("T")
AMPLE = Quota(10_000, 2**40)
SIZES = {"rows": 100_000, "files": INLINE_BYTES + 1}


def put(engine: StateEngine, size: int, quota: Quota = AMPLE) -> str:
    """Store a state with a blob of this size, and return its id."""
    return engine.put(a_record(), os.urandom(size), quota=quota).id


class Opened:
    """A store in a folder, with its metrics."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics()
        self.store = Store(SqliteEngine(folder), StateStoreMetrics(self.metrics))

    def call(self, call: Callable[[StateEngine], T]) -> T:
        return self.store.submit(call).result(PATIENCE_S)

    def put(self, size: int, quota: Quota = AMPLE) -> str:
        return self.call(lambda engine: put(engine, size, quota))

    def delete(self, state: str) -> None:
        self.call(lambda engine: engine.delete("acme", state))

    def fill(self, size: int) -> list[str]:
        """Put states until there is no room."""
        made: list[str] = []
        with suppress(StoreFull):
            while True:
                made.append(self.put(size))
        return made

    def troubles(self) -> set[str]:
        """The troubles in the metrics."""
        lines = [line for line in self.metrics.exposition().decode().splitlines() if line.startswith("attnserve_state_store_trouble{")]
        assert len(lines) == 4
        return {line.split('"')[1] for line in lines if line.endswith(" 1.0")}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def opened(small_disk: Path) -> Iterator[Opened]:
    made = Opened(small_disk / "states")
    yield made
    made.store.close()


def stuff(disk: Path) -> None:
    """Another program takes what room is left."""
    with (disk / "other").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_on_a_full_disk_states_are_refused_read_and_deleted(opened: Opened, small_disk: Path, size: int) -> None:
    made = opened.fill(size)
    stuff(small_disk)
    with pytest.raises(StoreFull, match="delete states, or make room"):
        opened.put(size)
    assert opened.troubles() == {"full"}
    assert not list(small_disk.rglob("*.part"))
    for state in made[:-1]:
        assert len(opened.call(lambda engine, state=state: engine.blob("acme", state))) == size  # type: ignore[misc]
        opened.delete(state)
    assert [each.id for each in opened.call(lambda engine: engine.page("acme", Filter()))] == made[-1:]
    assert opened.put(size)  # where the others were


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_on_a_full_disk_states_are_evicted_for_new_ones(opened: Opened, small_disk: Path, size: int) -> None:
    made = opened.fill(size)
    stuff(small_disk)
    quota = Quota(len(made), 2**40)
    new = [opened.put(size, quota) for _ in range(3)]
    assert [each.id for each in opened.call(lambda engine: engine.page("acme", Filter(limit=100)))] == new[::-1] + made[:2:-1]


def test_states_that_fit_the_log_and_not_the_database_are_refused(opened: Opened, small_disk: Path) -> None:
    """What is in SQLite's log can always be copied to the database, so deletions never find the log full. The log of these states has
    7 MiB of the disk's 12, so the database would have the last mebibyte and the 4 of the reserve."""
    begun, free = threading.Event(), threading.Event()
    opened.store.submit(lambda engine: (begun.set(), free.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    group = [opened.store.submit(lambda engine: put(engine, INLINE_BYTES)) for _ in range(14)]
    free.set()
    made = [future.result() for future in group if future.exception(PATIENCE_S) is None]
    assert len(made) < len(group)
    stuff(small_disk)
    for state in made:
        opened.delete(state)


def test_a_service_starts_on_a_full_disk_and_deletes(opened: Opened, small_disk: Path) -> None:
    made = opened.fill(100_000)
    stuff(small_disk)
    opened.store.close()
    stuff(small_disk)
    again = Opened(small_disk / "states")
    for state in made:
        again.delete(state)
    again.store.close()


@pytest.mark.parametrize("file", ["states.sqlite3", "states.sqlite3-wal", "states.sqlite3-shm", "blobs"])
def test_nothing_is_written_to_files_that_are_no_longer_in_place(tmp_path: Path, file: str) -> None:
    opened = Opened(tmp_path)
    opened.put(10)
    (tmp_path / file).rename(aside := tmp_path / "aside")
    for harm in ("deleted", "replaced"):
        if harm == "replaced":
            (tmp_path / file).write_bytes(b"")
        with pytest.raises(StoreFailed, match=f"{file} .* was deleted or replaced"):
            opened.put(10)
        assert opened.troubles() == {"lost"}
    (tmp_path / file).unlink()
    aside.rename(tmp_path / file)
    assert opened.put(10)
    assert opened.troubles() == set()
    opened.store.close()


def test_a_damaged_database_names_the_command_that_repairs_it(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    for _ in range(50):
        opened.put(20_000)
    opened.store.close()
    with (tmp_path / "states.sqlite3").open("r+b") as file:
        file.seek(8 * 4096)
        file.write(os.urandom(4096 * 100))
    opened = Opened(tmp_path)
    with pytest.raises(StoreFailed, match=f"damaged: .*`attnserve states rebuild --states {tmp_path}`"):
        opened.call(lambda engine: [engine.delete("acme", each.id) for each in engine.page("acme", Filter(limit=100))])
    assert opened.troubles() == {"damaged"}
    opened.store.close()
    (tmp_path / "states.sqlite3").write_bytes(os.urandom(4096))
    with pytest.raises(StoreFailed, match="attnserve states rebuild"):
        Opened(tmp_path)
