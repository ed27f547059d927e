"""`attnserve states backup` copies a store that is in use."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service import cli
from service.states.backup import backup
from service.states.record import Filter
from service.states.sqlite import SqliteEngine
from tests.service.states.sequences import a_record
from tests.service.states.test_rebuilding import AMPLE, contents, filled, large


def test_a_backup_is_the_store_at_one_moment(tmp_path: Path) -> None:
    """The service keeps the store open, and writes and deletes afterwards."""
    folder, to = tmp_path / "states", tmp_path / "copy"
    kept = filled(folder, 6)
    before = contents(folder)
    engine = SqliteEngine(folder)
    assert backup(folder, to) == (7, 3)
    gone = next(each for each in kept if before[each.id][1] == large(1))
    engine.delete(gone.tenant, gone.id)
    new = engine.put(a_record(50), large(50), quota=AMPLE)
    assert contents(to) == before
    assert backup(folder, to) == (7, 3), "again, into the same directory"
    assert contents(to) == {**{id: each for id, each in before.items() if id != gone.id}, new.id: (new, large(50))}
    engine.close()


def test_a_backup_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, to = tmp_path / "states", tmp_path / "copy"
    filled(folder, 4)
    backup(folder, to)
    before = contents(to)
    engine = SqliteEngine(folder)
    engine.put(a_record(50), large(50), quota=AMPLE)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            backup(folder, to)
    assert contents(to) == before
    backup(folder, to)
    assert len(contents(to)) == len(before) + 1
    engine.close()


def test_what_was_deleted_during_a_backup_is_gone_in_it(tmp_path: Path) -> None:
    folder, to = tmp_path / "states", tmp_path / "copy"
    engine = SqliteEngine(folder)
    kept = [engine.put(a_record(at), large(at), quota=AMPLE) for at in range(2)]

    def show(step: str, fraction: float | None) -> None:
        if step == "index":  # the files are there, and the index is not yet
            engine.delete("acme", kept[0].id)

    assert backup(folder, to, show) == (1, 1)
    copy = SqliteEngine(to)
    assert [each.id for each in copy.page("acme", Filter())] == [kept[1].id]
    assert len([name for _, _, names in os.walk(to / "blobs") for name in names]) == 1
    copy.close()
    engine.close()


def test_the_command_copies(tmp_path: Path) -> None:
    folder, to = tmp_path / "states", tmp_path / "copy"
    filled(folder, 4)
    done = CliRunner().invoke(cli.app, ["states", "backup", "--states", str(folder), "--to", str(to)])
    assert (done.exit_code, "5 states, 2 of their blobs as files" in done.output) == (0, True)
    for source, target in ((folder, folder), (tmp_path / "none", to)):
        done = CliRunner().invoke(cli.app, ["states", "backup", "--states", str(source), "--to", str(target)])
        assert done.exit_code == 2
