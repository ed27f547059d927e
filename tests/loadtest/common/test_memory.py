"""PSS, CPU time and names of a tree of real processes."""

import os
import subprocess
import sys

import psutil
import pytest

from loadtest.common import memory
from loadtest.errors import LoadtestError

PARENT = "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(flush=True); sys.stdin.read(); child.kill()"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_tree_is_measured_by_process_largest_first():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (python, python_bytes), (sleep, sleep_bytes) = memory.measure(parent.pid)
        assert sleep == "sleep"
        assert python_bytes > sleep_bytes > 0
        used = psutil.Process(parent.pid).cpu_times()
        assert memory.cpu_s([psutil.Process(parent.pid)]) >= used.user + used.system > 0
        parent.communicate()
    assert python != sleep
    assert memory.measure(os.getpid())[0][1] > 2**20


def test_a_process_that_has_ended_has_no_memory():
    with subprocess.Popen(["true"]) as ended:
        pass
    with pytest.raises(LoadtestError, match="smaps_rollup"):
        memory.measure(ended.pid)
