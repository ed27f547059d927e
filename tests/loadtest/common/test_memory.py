"""PSS and names of a process tree, read from a made-up /proc and from our own."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.common import memory
from loadtest.errors import LoadtestError

ROLLUP = """\
55a7d0f68000-7ffd1f7b5000 ---p 00000000 00:00 0                          [rollup]
Rss:              280336 kB
Pss:              {pss} kB
Pss_Dirty:        190112 kB
Pss_Anon:         189000 kB
Swap:                  0 kB
SwapPss:               0 kB
"""
COMMANDS = {
    10: ("python", 1, "/usr/bin/python3\0-m\0service.cli\0serve\0", 100),
    11: ("raylet", 10, "/x/ray/raylet\0--store=1\0", 20),
    12: ("ray::Single) x", 11, "ray::ServeReplica:attnserve:attnserve\0", 300),
    13: ("haproxy", 12, "/x/bin/haproxy\0-db\0", 7),
    20: ("other", 1, "/usr/bin/other\0", 999),
}


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for pid, (comm, parent, command, pss) in COMMANDS.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        folder.joinpath("stat").write_text(f"{pid} ({comm}) S {parent} 1 1 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 1" + " 0" * 32)
        folder.joinpath("statm").write_text("1 1 1 1 0 1 0\n")
        folder.joinpath("cmdline").write_text(command)
        folder.joinpath("smaps_rollup").write_text(ROLLUP.format(pss=pss))
    (tmp_path / "self").mkdir()
    (tmp_path / "stat").write_text("btime 1700000000\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: pid in COMMANDS)
    return tmp_path


def test_pss_is_read_and_not_one_of_its_parts(proc: Path):
    (proc / "20" / "smaps_rollup").write_text(ROLLUP.format(pss=1234))
    assert memory.measure(20)[0].pss_bytes == 1234 * 1024


def test_a_tree_is_summed_by_process_largest_first(proc: Path):
    measured = memory.measure(10)
    assert [(process.name, process.pss_bytes // 1024) for process in measured] == [
        ("ray::ServeReplica:attnserve:attnserve", 300),
        ("service.cli", 100),
        ("raylet", 20),
        ("haproxy", 7),
    ]


def test_a_process_that_ended_meanwhile_is_left_out(proc: Path):
    (proc / "13" / "smaps_rollup").unlink()
    assert {process.pid for process in memory.measure(10)} == {10, 11, 12}


def test_nothing_to_read_is_an_error(proc: Path):
    with pytest.raises(LoadtestError, match="smaps_rollup"):
        memory.measure(77)


def test_processor_time_is_user_and_system(proc: Path):
    assert memory.cpu_s(map(psutil.Process, (10, 11))) == 2 * 200 / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_our_own_process_is_found():
    assert memory.measure(os.getpid())[0].pss_bytes > 1024 * 1024
