"""`attnserve states rebuild` makes an index of the readable rows of a damaged database."""

import random
from contextlib import suppress
from pathlib import Path

import apsw
import pytest
from typer.testing import CliRunner

from service import cli
from service.errors import StateGone, StoreFailed
from service.states.rebuilding import Rebuilt, rebuild
from service.states.record import Document, Filter, NameChange, Quota, StateRecord
from service.states.sqlite import INLINE_BYTES, SqliteEngine
from tests.service.states.sequences import a_record
from tests.service.states.test_crashes import check_whole

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
        new = a_record(at, tenant="acme" if at % 3 else "other {tenant}")
        name = NameChange(f"name {at}")
        kept.append(engine.put(new, blob, ids=b"ids_", quota=AMPLE, name=name))
        engine.write(Document(kind="run", id=f"run_{at}", tenant=new.tenant, body=bytes(500)), 0, AMPLE)
    engine.put(a_record(99, tenant=kept[0].tenant), random.Random(0).randbytes(3_000), quota=AMPLE)
    engine.close()
    return kept


def contents(folder: Path) -> dict[str, tuple[StateRecord, bytes]]:
    engine = SqliteEngine(folder)
    found = {}
    for tenant in ("acme", "other {tenant}", ""):
        for each in engine.page(tenant, Filter(limit=10**6)):
            found[each.id] = (each, engine.blob(tenant, each.id))
    check_whole(folder)
    engine.close()
    return found


def test_an_undamaged_index_is_made_again_as_it_was(folder: Path) -> None:
    kept, before = filled(folder), contents(folder)
    made = rebuild(folder)
    assert made == Rebuilt(states=41, damaged=0, names=40, documents=40)
    assert contents(folder) == before
    engine = SqliteEngine(folder)
    name = engine.name(kept[1].tenant, "name 1")
    assert (name.state, name.version) == (kept[1].id, 1)
    assert engine.lineage(kept[1].tenant, kept[1].id)[0].ids == b"ids_"
    engine.unname(kept[1].tenant, NameChange("name 1"))
    assert engine.move(kept[1].tenant, NameChange("name 1"), kept[1].id).version > 1_000, "no version comes back"
    engine.close()
    assert sorted(each.name for each in folder.iterdir() if each.is_dir()) == ["blobs", "damaged"]


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_damaged_index_gives_what_can_be_read_of_it(folder: Path, seed: int) -> None:
    """Some pages, but not the first one, are overwritten."""
    filled(folder)
    before, file, chance = contents(folder), folder / "states.sqlite3", random.Random(seed)
    with file.open("r+b") as content:
        for page in chance.sample(range(1, file.stat().st_size // 4096), 3):
            content.seek(4096 * page)
            content.write(chance.randbytes(4096))
    made, engine, kept = rebuild(folder), SqliteEngine(folder), 0
    check_whole(folder)
    for tenant in ("acme", "other {tenant}"):
        for each in engine.page(tenant, Filter(limit=10**6)):
            with suppress(StateGone):  # its bytes were in a damaged page
                assert engine.blob(tenant, each.id) == before[each.id][1]
                kept += 1
    engine.close()
    assert made.states >= kept > 0
    assert rebuild(folder).states <= made.states, "it can be repeated"


@pytest.mark.parametrize("lost", ["index", "first page"])
def test_a_lost_index_asks_for_the_backup(folder: Path, lost: str) -> None:
    filled(folder)
    files = list((folder / "blobs").glob("??/*"))
    if lost == "index":
        (folder / "states.sqlite3").unlink()
        with pytest.raises(StoreFailed, match=r"has files of blobs and no index: copy states\.sqlite3 of the newest backup"):
            SqliteEngine(folder)
    else:
        with (folder / "states.sqlite3").open("r+b") as content:
            content.write(bytes(4096))
        with pytest.raises(StoreFailed, match="serve the newest backup"):
            rebuild(folder)
    assert list((folder / "blobs").glob("??/*")) == files, "nothing is removed"


def test_a_state_keeps_its_file_if_the_row_of_the_blob_is_lost(folder: Path) -> None:
    filled(folder)
    before = contents(folder)
    db = apsw.Connection(str(folder / "states.sqlite3"))
    db.execute("DELETE FROM blobs WHERE content IS NULL")
    db.close()
    assert rebuild(folder).damaged == 0
    assert contents(folder) == before


def test_a_store_in_use_is_left_as_it_is(folder: Path) -> None:
    filled(folder, 2)
    engine = SqliteEngine(folder)
    with pytest.raises(StoreFailed, match="stop the service first"):
        rebuild(folder)
    engine.close()
    assert rebuild(folder).states == 3


def test_the_command_says_what_came_back(folder: Path, tmp_path: Path) -> None:
    filled(folder, 4)
    done = CliRunner().invoke(cli.app, ["states", "rebuild", "--states", str(folder)])
    assert (done.exit_code, "5 states, 4 names, 4 documents; 0 states have lost" in done.output) == (0, True)
    done = CliRunner().invoke(cli.app, ["states", "rebuild", "--states", str(tmp_path / "none")])
    assert (done.exit_code, "there is no store" in done.output) == (2, True)
