"""What a cluster loses while it is asked, and what its clients see of it; deploy/faults.md has the table."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.conftest import WORKERS
from tests.cluster.load import HELD_STREAMS, HELD_TOKENS, PATIENCE_S, Load, Outcome, held, missing
from tests.cluster.nodes import APPLICATION, Cluster

pytestmark = [pytest.mark.live, pytest.mark.alone]
STREAMS = 12
# What clients are told of a stream that was lost: by its gateway, or by the connection where the gateway is lost too.
GONE, CUT = "the replica that worked on the request is gone", "incomplete chunked read"


def test_haproxy_killed_is_started_again(cluster: Cluster) -> None:
    """Of one node: clients of the other see nothing."""
    with Load([cluster.url("two")]) as load:
        load.more(20)
        cluster.kill("one", "bin/haproxy")
        cluster.until(lambda: cluster.ready("one"), "the node's port answers again")
        load.more(20)
    assert load.failures() == []


def test_the_controller_killed_costs_nothing(cluster: Cluster) -> None:
    """Requests are answered meanwhile, and what breaks afterwards is mended."""
    with Load([cluster.url(name) for name in WORKERS]) as load:
        load.more(20)
        (before,) = cluster.processes("head", "ray::ServeController")
        cluster.kill("head", "ray::ServeController")
        cluster.until(lambda: before not in (now := cluster.processes("head", "ray::ServeController")) and now, "there is another")
        cluster.until(cluster.settled, "it knows what there is")
        load.more(20)
    assert load.failures() == []
    mends(cluster)


def test_a_worker_killed_costs_what_it_had_accepted(cluster: Cluster) -> None:
    """Embeddings of a lost encoder are asked for again by their gateway, those of a lost gateway by HAProxy. A stream of a lost generator
    ends with an error that says so, one whose gateway is gone just ends: never with [DONE]. Another worker makes the service whole."""
    with Load([cluster.url("one")]) as load, ThreadPoolExecutor(STREAMS) as clients:
        load.more(30)
        begun = threading.Semaphore(0)
        endless = [clients.submit(endless_stream, cluster.url("one"), number, begun) for number in range(STREAMS)]
        for _ in endless:
            assert begun.acquire(timeout=PATIENCE_S)
        cluster.kill("two")
        texts = [stream.result() for stream in endless]
        lost = [text for text in texts if GONE in text or CUT in text]
        assert lost, [text[-200:] for text in texts]
        assert not any("[DONE]" in text for text in lost)
        # The others go on elsewhere until their deadline, and end there as far as they are.
        assert all('"finish_reason":"length"' in text for text in texts if text not in lost), [text[-200:] for text in texts]
        load.more(60)
        assert load.failures("embedding") == []
        assert all(stated(each) for each in load.failures("stream")), load.failures()
        before = len(load.failures())
        load.more(20)
        assert len(load.failures()) == before, "what comes after the loss is answered"
        cluster.start_worker("two", cpus=3)
        cluster.until(lambda: cluster.settled() and len(cluster.replicas("generator")) == 2, "every replica has its place again")
        cluster.until(lambda: cluster.ready(*WORKERS), "both workers answer")
        load.more(20)
        assert len(load.failures()) == before


def test_a_worker_deleted_as_planned_costs_nothing(cluster: Cluster) -> None:
    """SIGTERM to its `ray start --block`, as Kubernetes sends it when a pod is deleted: what its replicas have is finished, also what came
    through its own HAProxy, and it ends long before its time is over. Another worker takes its place."""
    with Load([cluster.url("one")]) as load, held([cluster.url("one")]), ThreadPoolExecutor(HELD_STREAMS) as clients:
        load.more(20)
        begun = threading.Semaphore(0)
        through = [clients.submit(whole_stream, cluster.url("two"), number, begun) for number in range(HELD_STREAMS)]
        for _ in through:
            assert begun.acquire(timeout=PATIENCE_S)
        cluster.terminate("two", timeout_s=2 * PATIENCE_S)
        assert [stream.result() for stream in through] == [""] * HELD_STREAMS
        load.more(20)
    assert load.failures() == []
    cluster.start_worker("two", cpus=3)
    cluster.until(lambda: cluster.settled() and len(cluster.replicas("generator")) == 2, "every replica has its place again")
    cluster.until(lambda: cluster.ready(*WORKERS), "both workers answer")


def test_the_head_killed_costs_nothing(cluster: Cluster) -> None:
    """With what it knew in Redis, workers answer on without it, and a new one takes its place."""
    if not cluster.remembers:
        pytest.skip("needs Redis: apt-get install redis-server")
    with Load([cluster.url(name) for name in WORKERS]) as load:
        load.more(20)
        cluster.kill("head")
        load.more(60)
        cluster.start_head()
        cluster.until(cluster.settled, "the new head knows what there is")
        load.more(20)
    assert load.failures() == []
    mends(cluster)


def test_redis_killed_is_a_head_lost(cluster: Cluster) -> None:
    """Its GCS ends with Redis, and the head with its GCS; workers answer on. Redis comes back with all that was written, so the next head
    knows what there is."""
    if not cluster.remembers:
        pytest.skip("needs Redis: apt-get install redis-server")
    with Load([cluster.url(name) for name in WORKERS]) as load:
        load.more(20)
        cluster.kill("redis")
        cluster.until(lambda: cluster.ended("head"), "the head has ended")
        load.more(60)
        cluster.kill("head")  # what Ray has left
        cluster.start_redis()
        cluster.start_head()
        cluster.until(cluster.settled, "the new head knows what there is")
        load.more(20)
    assert load.failures() == []
    mends(cluster)


def stated(outcome: Outcome) -> bool:
    """A stream's failure in one of the forms that clients are told of."""
    return GONE in outcome.problem or CUT in outcome.problem


def whole_stream(url: str, number: int, begun: threading.Semaphore) -> str:
    """What a stream lacks that is long enough to be under way when something happens; nothing where it is whole."""
    asked = {"model": "tiny-decoder", "prompt": f"{number}", "max_tokens": HELD_TOKENS, "seed": number, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = []
    headers = {"x-session-id": f"through-{number}"}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if not lines:
                    begun.release()
                lines.append(line)
    except httpx.HTTPError as error:
        return repr(error)
    return missing("stream", "\n".join(lines), HELD_TOKENS)


def endless_stream(url: str, number: int, begun: threading.Semaphore) -> str:
    """All that comes of a stream that only its deadline ends, or what it is lost with."""
    asked = {"model": "tiny-decoder", "prompt": "a", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
    headers = {"x-session-id": f"session-{number}", "x-request-timeout-ms": "8000"}
    text = ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if not text:
                    begun.release()
                text += line
    except httpx.RemoteProtocolError as error:
        text += str(error)
    return text


def mends(cluster: Cluster) -> None:
    """An encoder that dies is replaced, which needs a controller and a GCS that know of it."""
    title = f"ray::ServeReplica:{APPLICATION}:encoder"
    (before,) = cluster.processes("one", title)
    cluster.kill("one", title)
    cluster.until(lambda: before not in (now := cluster.processes("one", title)) and now, "there is another encoder")
    cluster.until(lambda: cluster.settled() and len(cluster.replicas("encoder")) == 2, "it is one of two that run")
