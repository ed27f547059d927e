"""`attnserve states rebuild` makes an index of a damaged database, and of the files of blobs if there is none."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from typer.testing import CliRunner

from service import cli
from service.errors import ServiceError, StateGone, StoreFailed
from service.states.rebuilding import rebuild
from service.states.record import Document, Filter, NameChange, Quota, StateRecord
from service.states.sqlite import INLINE_BYTES, SqliteEngine
from tests.service.fakes import first
from tests.service.states.test_blob import GOOD, PACKED
from tests.service.states.test_crashes import check_whole
from tests.service.states.test_store import record

AMPLE = Quota(states=10**6, size=10**12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


def large(at: int) -> bytes:
    return at.to_bytes(4, "little") * (INLINE_BYTES // 4 + 1)


def filled(folder: Path, count: int = 40) -> list[StateRecord]:
    """Inline blobs and files, two tenants, forks, names and documents."""
    engine, kept = SqliteEngine(folder), []
    for at in range(count):
        blob = large(at) if at % 2 else random.Random(at).randbytes(3_000)
        new = record(at, tenant="acme" if at % 3 else "other {tenant}")
        name = NameChange(f"name {at}")
        kept.append(engine.put(new, blob, ids=b"ids_", quota=AMPLE, name=name))
        engine.write(Document(kind="run", id=f"run_{at}", tenant=new.tenant, body=bytes(500)), 0, AMPLE)
    engine.put(record(99, tenant=kept[0].tenant), random.Random(0).randbytes(3_000), quota=AMPLE)
    engine.close()
    return kept


def contents(folder: Path) -> dict[str, tuple[StateRecord, bytes]]:
    engine = SqliteEngine(folder)
    found = {}
    for tenant in ("acme", "other {tenant}", ""):
        for each in engine.page(tenant, Filter(limit=10**6)):
            found[each.id] = (each, engine.blob(tenant, each.id))
    check_whole(engine, folder)
    engine.close()
    return found


def test_an_undamaged_index_is_made_again_as_it_was(folder: Path) -> None:
    kept, before = filled(folder), contents(folder)
    made = rebuild(folder)
    assert (made.states, made.recovered, made.damaged, made.names, made.documents, made.unreadable) == (41, 0, 0, 40, 40, False)
    assert contents(folder) == before
    engine = SqliteEngine(folder)
    name = engine.name(kept[1].tenant, "name 1")
    assert (name.state, name.version) == (kept[1].id, 1)
    assert engine.lineage(kept[1].tenant, kept[1].id)[0].ids == b"ids_"
    engine.unname(kept[1].tenant, NameChange("name 1"))
    assert engine.move(kept[1].tenant, NameChange("name 1"), kept[1].id).version > 1_000, "no version comes back"
    engine.close()
    assert sorted(each.name for each in folder.iterdir() if each.is_dir()) == ["blobs", "damaged"]


def test_the_row_of_a_deleted_state_whose_child_is_lost_does_not_stay_forever(folder: Path) -> None:
    engine = SqliteEngine(folder)
    parent = engine.put(record(1), b"1", quota=AMPLE)
    child = engine.put(replace(record(2), parent=parent.id), b"2", quota=AMPLE)
    engine.delete("acme", parent.id)
    engine.sweep()  # the parent's row stays for its child
    engine.close()
    with closing(apsw.Connection(str(folder / "states.sqlite3"))) as db:
        db.execute("DELETE FROM states WHERE id = ?", (child.id,))
        db.execute("DELETE FROM blobs")
    rebuild(folder)
    engine = SqliteEngine(folder)
    engine.sweep()
    assert engine._db.execute("SELECT count(*) FROM states").get == 0
    engine.close()


@pytest.mark.parametrize("seed", first(3, range(12)))
def test_a_damaged_index_gives_what_can_be_read_of_it(folder: Path, seed: int) -> None:
    """Pages anywhere in the file are overwritten: of an index, of a table, of large values, the first one."""
    kept, before = filled(folder), contents(folder)
    file, chance = folder / "states.sqlite3", random.Random(seed)
    pages = file.stat().st_size // 4096
    with file.open("r+b") as content:
        for page in [0] if not seed else chance.sample(range(1, pages), 3):
            content.seek(4096 * page + (0 if seed % 2 else chance.randrange(4000)))
            content.write(chance.randbytes(4096 if seed % 2 else 96))
    made = rebuild(folder)
    after = contents(folder)
    files = {each.id for each in kept if each.size > INLINE_BYTES}
    assert files <= set(after), "a blob with a file of its own is never lost"
    for state, (found, blob) in after.items():
        assert blob == before[state][1]
        assert (found.tenant, found.model, found.position, found.parent) == (
            before[state][0].tenant,
            before[state][0].model,
            before[state][0].position,
            before[state][0].parent,
        )
    assert made.states == len(after)
    if seed == 0:
        assert after == before, "the first page is that of any index"
    assert rebuild(folder).states == made.states, "it can be repeated"


def test_a_lost_index_gives_the_states_of_all_files(folder: Path) -> None:
    kept = filled(folder)
    with_files = {each.id: each for each in kept if each.size > INLINE_BYTES}
    (folder / "states.sqlite3").unlink()
    with pytest.raises(StoreFailed, match="has files of blobs and no index: `attnserve states rebuild"):
        SqliteEngine(folder)
    assert len(list((folder / "blobs").glob("??/*"))) == len(with_files), "a start without an index removes nothing"
    assert rebuild(folder).recovered == len(with_files)
    after = contents(folder)
    assert {state: found for state, (found, _) in after.items()} == with_files
    engine = SqliteEngine(folder)
    some = next(iter(with_files.values()))
    assert engine.lineage(some.tenant, some.id)[0].ids == b"ids_"
    engine.close()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_blob_in_the_database_whose_row_is_lost_comes_back_by_its_header(folder: Path, deleted: bool) -> None:
    """If the state of the header was deleted, it was a fork that had these bytes: it comes back with another id."""
    engine = SqliteEngine(folder)
    kept = engine.put(replace(record(1), id=GOOD.id), PACKED, quota=AMPLE)
    engine.put(replace(record(2), parent=kept.id, origin="fork"), None, quota=AMPLE)
    if deleted:
        engine.delete("acme", kept.id)
    engine.close()
    db = apsw.Connection(str(folder / "states.sqlite3"))
    db.execute("DELETE FROM states WHERE status = 'ready'")
    db.close()
    assert rebuild(folder).recovered == 1
    engine = SqliteEngine(folder)
    (found,) = engine.page("acme", Filter())
    assert engine.blob("acme", found.id) == PACKED
    assert (found.position, found.fingerprint, found.numerics) == (GOOD.position, GOOD.fingerprint, GOOD.numerics)
    assert (found.id, found.parent) == (found.id, kept.id) if deleted else (kept.id, GOOD.parent)
    engine.close()


def test_a_state_keeps_its_file_if_the_row_of_the_blob_is_lost(folder: Path) -> None:
    filled(folder)
    before = contents(folder)
    db = apsw.Connection(str(folder / "states.sqlite3"))
    db.execute("DELETE FROM blobs WHERE content IS NULL")
    db.close()
    assert rebuild(folder).recovered == 0
    assert contents(folder) == before


def test_damaged_bytes_end_their_states(folder: Path) -> None:
    engine = SqliteEngine(folder)
    states = [engine.put(record(at), bytes([at]) * 100, quota=AMPLE) for at in range(3)]
    engine.close()
    db = apsw.Connection(str(folder / "states.sqlite3"))
    db.execute("UPDATE blobs SET content = zeroblob(100) WHERE id = 2")
    db.close()
    made = rebuild(folder)
    assert (made.states, made.damaged, made.unreadable) == (2, 1, True)
    engine = SqliteEngine(folder)
    with pytest.raises(StateGone, match="damaged"):
        engine.get("acme", states[1].id)
    assert engine.usage("acme").size == 200
    engine.close()


def test_a_store_in_use_is_left_as_it_is(folder: Path) -> None:
    filled(folder, 2)
    engine = SqliteEngine(folder)
    with pytest.raises(StoreFailed, match="stop the service first"):
        rebuild(folder)
    engine.close()
    assert rebuild(folder).states == 3


def test_a_rebuild_that_was_stopped_changes_nothing_and_can_be_repeated(folder: Path) -> None:
    filled(folder)
    before = contents(folder)

    def stop(step: str, fraction: float | None) -> None:
        if step == "documents":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebuild(folder, stop)
    assert contents(folder) == before
    rebuild(folder)
    assert contents(folder) == before


def test_the_command_says_what_came_back(folder: Path, tmp_path: Path) -> None:
    filled(folder, 4)
    done = CliRunner().invoke(cli.app, ["states", "rebuild", "--states", str(folder)])
    assert (done.exit_code, "5 states (0 of their blobs alone), 4 names, 4 documents; 0 states have lost" in done.output) == (0, True)
    (folder / "states.sqlite3").unlink()
    done = CliRunner().invoke(cli.app, ["states", "rebuild", "--states", str(folder)])
    assert "2 states (2 of their blobs alone), 0 names, 0 documents" in done.output
    assert "parts of the old index could not be read" in done.output
    done = CliRunner().invoke(cli.app, ["states", "rebuild", "--states", str(tmp_path / "none")])
    assert (done.exit_code, "there is no store" in done.output) == (2, True)
    with pytest.raises(ServiceError):
        SqliteEngine(folder).get("acme", "state_" + "0" * 32)
