"""Processes and gauges are found and read; what grows is told from what stays."""

import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.common.server import summed
from loadtest.load import flatness, watch
from loadtest.load.watch import Observation, ProcessUsage

METRICS = """\
# HELP te_queue_size Inputs waiting
te_queue_size{model="a"} 3.0
te_queue_size{model="b"} 4.0
te_queue_size_of_another 9.0
vllm:num_requests_running{model_name="c"} 2.0
attnserve_active_requests 1.0
"""


@dataclass
class Growth:
    """Of a made-up process, in all its life."""

    rss_mib: float = 0.0
    fds: float = 0.0
    fds_left: float = 0.0  # at rest
    threads: float = 0.0


def observations(growth: Growth, left: float = 0.0, count: int = 100) -> list[Observation]:
    """A process that begins with 100 MiB, 50 descriptors and 10 threads, with some noise; two runs all the while, `left` at the end."""
    draw, made = random.Random(0), []
    for number in range(count):
        part = number / (count - 1)
        rss = int((100 + growth.rss_mib * part + draw.uniform(-1, 1)) * 2**20)
        process = ProcessUsage(number, 7, "replica", rss, round(50 + growth.fds * part), round(10 + growth.threads * part), 0.5 * number)
        made.append(Observation(number, [process], {"vllm:num_requests_running": 2.0, "attnserve_active_requests": 3.0}))
    rest = [made[0].processes[0]._replace(fds=round(50 + growth.fds_left))]
    return [*made, Observation(count + 5, rest, {"vllm:num_requests_running": left, "attnserve_active_requests": 1.0})]


def not_flat(growth: Growth, left: float = 0.0) -> list[str]:
    return [each.what for each in flatness.judge(observations(growth, left), 0, 99) if not each.flat]


def test_a_process_that_stays_as_it_is_is_flat():
    assert not_flat(Growth()) == []


@pytest.mark.parametrize(
    ("growth", "what"),
    [(Growth(rss_mib=12), "rss"), (Growth(fds_left=20), "fds at rest"), (Growth(threads=5), "threads")],
    ids=str,
)
def test_what_grows_is_named(growth: Growth, what: str):
    assert not_flat(growth) == [f"replica (7) {what}"]


def test_connections_that_clients_keep_while_they_are_there_are_no_leak():
    assert not_flat(Growth(fds=500)) == []


def test_a_process_has_one_row_whatever_ray_calls_it_meanwhile():
    busy = observations(Growth())
    for number in range(0, 100, 2):
        (process,) = busy[number].processes
        busy[number] = busy[number]._replace(processes=[process._replace(name="ray::Replica.check_health")])
        busy[number + 1] = busy[number + 1]._replace(processes=[process._replace(at_s=number + 1, name="ray::Replica")])
    assert [each.what for each in flatness.judge(busy, 0, 99)][:3] == [
        f"ray::Replica (7) {what}" for what in ("rss", "threads", "fds at rest")
    ]


def test_what_shrinks_or_jumps_once_is_flat():
    assert not_flat(Growth(rss_mib=-30, fds=-5)) == []
    with_outlier = observations(Growth())
    with_outlier[50] = with_outlier[50]._replace(processes=[with_outlier[50].processes[0]._replace(rss_bytes=2**32)])
    assert all(each.flat for each in flatness.judge(with_outlier, 0, 99))


def test_a_slot_that_is_not_given_back_is_a_leak():
    assert not_flat(Growth(), left=1.0) == ["vllm:num_requests_running at rest"]


def test_without_a_process_it_is_not_known_that_nothing_grew():
    """Neither one that was never seen, nor one that did not live all the while; what /metrics says is told all the same."""
    unseen = [each._replace(processes=[]) for each in observations(Growth())]
    assert flatness.not_flat(flatness.judge(unseen, 0, 99)) is None
    assert flatness.not_at_rest(flatness.judge(unseen, 0, 99)) == 0
    replaced = [each._replace(processes=[each.processes[0]._replace(pid=at // 50)]) for at, each in enumerate(observations(Growth()))]
    assert flatness.not_flat(flatness.judge(replaced, 0, 99)) is None
    assert flatness.not_flat(flatness.judge(observations(Growth(threads=5)), 0, 99)) == 1
    silent = [each._replace(gauges={}) for each in observations(Growth())]
    assert flatness.not_flat(flatness.judge(silent, 0, 99)) == 0
    assert flatness.not_at_rest(flatness.judge(silent, 0, 99)) is None


def test_growth_is_that_of_the_whole_time():
    assert flatness.growth([0, 10, 20, 30], [5, 6, 7, 8]) == pytest.approx(3)
    assert flatness.growth([1.0], [5]) == 0


def test_gauges_are_summed_over_models():
    assert summed(METRICS, watch.GAUGES) == {"te_queue_size": 7.0, "vllm:num_requests_running": 2.0, "attnserve_active_requests": 1.0}


def test_a_service_that_does_not_answer_has_no_gauges():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert watch.gauges(f"http://127.0.0.1:{closed.getsockname()[1]}") == {}


def test_the_process_behind_a_port_is_found_and_read(tmp_path: Path):
    """Only that of a service: a tunnel to another machine listens as well."""
    (script := tmp_path / "attnserve").write_text(
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as made:\n    print(made.getsockname()[1], flush=True)\n    input()"
    )
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert watch.service_pid(f"http://127.0.0.1:{int(service.stdout.readline())}") == service.pid
        service.communicate("\n")
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        assert watch.service_pid(f"http://127.0.0.1:{tunnel.getsockname()[1]}") is None
    assert watch.service_pid("http://192.0.2.1:8000") is None
    (ours,) = [process for process in watch.processes(os.getpid(), 5.0) if process.pid == os.getpid()]
    assert ours.rss_bytes > 2**20
    assert ours.fds > 2
    assert ours.threads >= 1


def test_processor_time_is_told_by_process():
    assert watch.cores(observations(Growth()), 10.0, 20.0) == {"replica": pytest.approx(0.5)}
    assert watch.cores(observations(Growth()), 200.0, 300.0) == {}
