"""The store in Redis: away and back, full, damaged, or set up in a way that loses states."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from service.errors import StateGone, StateNotFound, StoreFailed
from service.states.backend import Changes
from service.states.record import DOCUMENT_BYTES, Document, Filter, Fork, IdempotencyKey, NameChange, Quota, Usage
from service.states.redis import RedisEngine
from tests.service.states.conftest import PASSWORD, Clock, RedisServer, redis_server_in
from tests.service.states.sequences import a_record

AMPLE = Quota(states=100, size=10**9)


@pytest.fixture
def engine(redis_server: RedisServer, clock: Clock) -> Iterator[RedisEngine]:
    redis_server.client.flushall()
    made = RedisEngine(redis_server.url, password=PASSWORD, clock=clock)
    yield made
    made.close()


def only(server: RedisServer, pattern: str) -> bytes:
    (found,) = server.client.keys(pattern)
    return bytes(found)


def test_a_redis_that_is_back_has_all_and_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("redis.retry.sleep", waits.append)
    with redis_server_in(tmp_path) as server:
        engine = RedisEngine(server.url, password=PASSWORD)
        kept = engine.put(a_record(), b"tensors", quota=AMPLE, name=NameChange("doc"))
        server.kill()
        with pytest.raises(StoreFailed, match=r"Connection (refused|closed|reset)") as failed:
            engine.get("acme", kept.id)
        with pytest.raises(StoreFailed):
            engine.usage("acme")
        with pytest.raises(StoreFailed):
            engine.due("run", 0.0, 5)
        assert sum(waits) < 5
        assert PASSWORD not in str(failed.value)
        server.start()
        assert engine.blob("acme", kept.id) == b"tensors"  # the script is loaded again
        assert engine.name("acme", "doc").state == kept.id
        engine.close()


def test_a_connection_that_was_closed_while_idle_is_replaced(engine: RedisEngine, redis_server: RedisServer) -> None:
    engine.put(a_record(), b"1", quota=AMPLE)
    redis_server.client.client_kill_filter(_type="normal", skipme=True)
    engine.put(a_record(), b"2", quota=AMPLE)
    assert engine.usage("acme").states == 2


@contextmanager
def cutting_proxy(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A port that leads to Redis. If the event is set, it passes the next request for a commit on, and cuts the connection instead of
    answering."""
    listener, cut, sent, ended = socket.create_server(("127.0.0.1", 0)), threading.Event(), threading.Event(), list[socket.socket]()

    def carry(source: socket.socket, to: socket.socket, *, answers: bool) -> None:
        with suppress(OSError):
            while (part := source.recv(65_536)) and not (answers and sent.is_set()):
                if not answers and cut.is_set() and b"commit" in part:
                    sent.set()
                to.sendall(part)
            cut.clear()
            sent.clear()
            to.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                ended.extend(pair)
                for source, to, answers in ((*pair, False), (*pair[::-1], True)):
                    threading.Thread(target=carry, args=(source, to), kwargs={"answers": answers}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], cut
    listener.shutdown(socket.SHUT_RDWR)
    for each in (listener, *ended):
        each.close()


@pytest.mark.parametrize("server", ["redis_server", "redis_cluster"])
def test_a_call_whose_answer_is_lost_is_not_sent_again(request: pytest.FixtureRequest, server: str) -> None:
    """It was carried out once; only the caller knows whether it may be repeated."""
    redis, document = request.getfixturevalue(server), Document(kind="run", id="run_1", tenant="acme", body=b"{}")
    redis.client.flushall()
    with cutting_proxy(redis.port) as (port, cut):
        redis.client.config_set("cluster-announce-port", port)  # clients of a cluster connect to what it announces
        far = RedisEngine(f"redis://127.0.0.1:{port}/0", password=PASSWORD)
        far.write(document, 0, AMPLE)
        cut.set()
        with pytest.raises(StoreFailed):
            far.write(document, None, AMPLE)
        assert far.read("acme", "run", "run_1").version == 2  # it connects again
        far.close()
        redis.client.config_set("cluster-announce-port", 0)


@pytest.mark.parametrize("harm", ["flipped", "missing"])
def test_damaged_bytes_are_set_apart_and_never_given(engine: RedisEngine, redis_server: RedisServer, harm: str) -> None:
    state = engine.put(a_record(pinned=True), b"tensors", quota=AMPLE, name=NameChange("doc"))
    fork = engine.put(a_record(parent=state.id, origin="fork"), None, quota=AMPLE)
    key = only(redis_server, "*:blob:*")
    if harm == "flipped":
        redis_server.client.setrange(key, 0, b"T")
    else:
        redis_server.client.delete(key)
    for each in (state.id, fork.id, fork.id):
        with pytest.raises(StateGone, match="damaged"):
            engine.blob("acme", each)
    assert engine.usage("acme") == Usage()
    assert engine.page("acme", Filter()) == []
    apart = redis_server.client.keys("*:damaged:*")
    assert [redis_server.client.get(each) for each in apart] == ([b"Tensors"] if harm == "flipped" else [])
    again = engine.put(a_record(), b"tensors", quota=AMPLE)
    assert engine.blob("acme", again.id) == b"tensors"
    redis_server.client.delete(key)
    assert engine.put(a_record(), b"tensors", quota=AMPLE).shared_by == 2
    assert engine.blob("acme", again.id) == b"tensors", "equal bytes that came again replace the missing ones"


def test_bytes_that_were_replaced_meanwhile_are_not_set_apart(engine: RedisEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    state = engine.put(a_record(), b"tensors", quota=AMPLE)
    content = engine.content
    answers = iter([b"Tensors"])  # as they were before another process replaced them
    monkeypatch.setattr(engine, "content", lambda *given: next(answers, None) or content(*given))
    assert engine.blob("acme", state.id) == b"tensors"
    assert engine.usage("acme").states == 1


def test_a_transaction_begins_again_if_another_process_changes_the_tenant(
    engine: RedisEngine, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a transaction that would be refused: what it has read does not hold any more."""
    other, commit, kept = RedisEngine(redis_server.url, password=PASSWORD), engine.commit, a_record()
    before: list[Callable[[], object]] = []

    def commit_late(changes: Changes) -> bool:
        if before:
            before.pop()()
        return commit(changes)

    monkeypatch.setattr(engine, "commit", commit_late)
    before.append(lambda: other.put(kept, b"1", quota=AMPLE, name=NameChange("doc", 0)))
    assert engine.move("acme", NameChange("doc"), engine.put(a_record(), b"2", quota=AMPLE).id).version == 2
    before.append(lambda: other.unname("acme", NameChange("doc")))
    with pytest.raises(StateNotFound):
        engine.unname("acme", NameChange("doc", 1))
    assert engine.usage("acme") == Usage(2, 2, 0)
    other.close()


def test_a_full_redis_refuses_writes_and_can_be_read_and_emptied(engine: RedisEngine, redis_server: RedisServer, clock: Clock) -> None:
    states = [engine.put(a_record(expires=clock.now + 60), bytes([at]) * 1000, quota=AMPLE, name=NameChange("doc")) for at in range(3)]
    engine.write(Document(kind="run", id="run_1", tenant="acme", body=b"{}"), 0, AMPLE)
    before = engine.usage("acme")
    redis_server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreFailed, match="maxmemory"):
            engine.put(a_record(), b"new", quota=AMPLE)
        with pytest.raises(StoreFailed):
            engine.write(Document(kind="run", id="run_1", tenant="acme", body=b"longer"), 1, AMPLE)
        assert engine.usage("acme") == before
        assert engine.blob("acme", states[0].id) == bytes(1000)
        engine.delete("acme", states[0].id)
        clock.now += 61
        engine.sweep()
        assert engine.ended["expired"] == 2
        engine.erase("acme", "run", "run_1", 1)
        assert engine.usage("acme") == Usage()
        assert redis_server.client.keys("*:blob:*") == []
    finally:
        redis_server.client.config_set("maxmemory", 0)


def test_a_redis_that_may_evict_states_is_refused(redis_server: RedisServer) -> None:
    redis_server.client.config_set("maxmemory", 10**9)
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreFailed, match="set maxmemory-policy to noeviction; it is allkeys-lru"):
            RedisEngine(redis_server.url, password=PASSWORD)
    finally:
        redis_server.client.config_set("maxmemory", 0)
        redis_server.client.config_set("maxmemory-policy", "noeviction")


def test_no_message_has_the_password(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.states.redis_client._ANSWER_S", 0.2)  # the wait for a TLS handshake with a server without TLS
    port = redis_server.port
    for url in (
        f"redis://127.0.0.1:{port}",
        "redis://127.0.0.1:1",
        "redis://host:port",
        "redis://127.0.0.1:0/x",
        f"rediss://127.0.0.1:{port}",
    ):
        with pytest.raises(StoreFailed) as refused:
            RedisEngine(url, password="another-secret")
        assert "another-secret" not in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(StoreFailed) as refused:
        RedisEngine("redis://:hidden/secret@127.0.0.1:1/0")
    assert "hidden" not in repr((refused.value, refused.value.__cause__))


def test_a_store_of_another_version_is_refused(engine: RedisEngine, redis_server: RedisServer) -> None:
    redis_server.client.set("attnserve:version", "99")
    with pytest.raises(StoreFailed, match="version b'99', and this release reads b'3'"):
        RedisEngine(redis_server.url, password=PASSWORD)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_store_of_an_earlier_version_is_read(engine: RedisEngine, redis_server: RedisServer, version: str) -> None:
    """It had the same keys and did not count metadata, token ids and rows."""
    engine.write(Document(kind="run", id="run_1", tenant="acme", body=b"{}"), 0, AMPLE)
    gone = engine.put(a_record(), b"gone", ids=b"ids_", quota=AMPLE)
    kept = engine.put(a_record(parent=gone.id, metadata={"a": "b"}), b"small", ids=b"ids_", quota=AMPLE)
    engine.delete("acme", gone.id)
    before, redis = engine.usage("acme"), redis_server.client
    (usage,) = redis.keys("*:usage")
    redis.hset(usage, "size", 5 + 2)
    redis.hdel(usage, "gone_size")
    redis.set("attnserve:version", version)
    for _ in range(2):
        again = RedisEngine(redis_server.url, password=PASSWORD)
        assert again.usage("acme") == before == Usage(1, 5 + 4 + len('"a":"b"') + DOCUMENT_BYTES + 2, 0)
        assert [each.ids for each in again.lineage("acme", kept.id)] == [b"ids_", b"ids_"]
        assert (redis.hget(usage, "gone_size"), redis.get("attnserve:version")) == (b"4", b"3")
        again.close()


def test_a_tenant_whose_states_are_gone_leaves_only_its_usage(engine: RedisEngine, redis_server: RedisServer, clock: Clock) -> None:
    parent = engine.put(a_record(pinned=True, metadata={"a": "b"}), b"1", ids=b"ids_", quota=AMPLE, name=NameChange("doc"))
    forks = [Fork(a_record(parent=parent.id, expires=at), IdempotencyKey(f"key {at}", "d")) for at in (clock.now + 1, None)]
    for fork in engine.fork(forks, AMPLE):
        engine.delete("acme", fork.id)
    engine.delete("acme", parent.id)
    clock.now += 86_401
    while engine.sweep():
        pass
    assert [key.rpartition(b":")[2] for key in sorted(redis_server.client.keys("*"))] == [b"tenants", b"version", b"usage"]


def test_all_keys_of_a_tenant_are_on_one_node_of_a_cluster(engine: RedisEngine, redis_server: RedisServer) -> None:
    engine.put(a_record(tenant="a{b}c"), b"1", quota=AMPLE)
    keys = [key.decode() for key in redis_server.client.keys("*")]
    assert len({key.split(":")[1] for key in keys if "{" in key}) == 1
    assert sorted(key for key in keys if "{" not in key) == ["attnserve:tenants", "attnserve:version"]
    assert not any("a{b}c" in key for key in keys)


def test_a_long_line_and_many_states_are_read_in_parts(engine: RedisEngine) -> None:
    parent = None
    for at in range(450):
        kept = engine.put(a_record(parent=parent, position=at), b"%d" % at, ids=b"%03d" % at, quota=Quota(states=1000, size=10**6))
        parent = kept.id
    line = engine.lineage("acme", kept.id)
    assert [each.ids for each in line] == [b"%03d" % at for at in reversed(range(450))]
    assert len(engine.page("acme", Filter(limit=430))) == 430
    assert [each.position for each in engine.page("acme", Filter(metadata=(("no", "such"),)))] == []
