"""Measures a store of states without an engine: single states, many states, and blobs as large as a KV cache. All times are in
milliseconds."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from service.states.engine import SWEPT
from service.states.record import Filter, Quota, StateRecord, new_state_id
from service.states.sqlite import SqliteEngine
from service.states.store import GroupingEngine

WRITES = 200
CACHES = 3  # number of writes and reads for each size of KV cache
PAGE = 100
ROOM = Quota(states=2**31, size=2**62)
_LIFE_S = 3_600.0  # seconds after which stored states expire
_MOST_REDIS = 2**29  # largest value in Redis, in bytes


@dataclass(frozen=True)
class ManyStates:
    """`took`: kind of call -> its median ("p50") and longest ("most") milliseconds. `memory`: growth of this process's resident memory in
    MiB. `blobs`: number of blobs that the store contains after forking."""

    took: dict[str, dict[str, float]]
    memory: float
    blobs: int


def turns(location: str, blob: bytes) -> dict[str, dict[str, float]]:
    """Write states of the size of `blob`, one at a time, then read them. Returns {"write": .., "read": ..}, each with p50 and p99 in
    milliseconds. `location` is the folder of an SQLite store or the URL of a Redis server."""
    with _opened(location) as engine:
        return _written_and_read(engine, [blob[:-8] + number.to_bytes(8, "little") for number in range(WRITES)])


def caches(location: str, size: int) -> dict[str, dict[str, float]] | None:
    """Measure the same as `turns` for CACHES blobs of `size` bytes, the size of a KV cache. Returns None if the store cannot hold such a
    blob."""
    if size > _MOST_REDIS and "://" in location:
        return None
    with _opened(location) as engine:
        once = os.urandom(2**20)
        made = (once * (size // len(once) + 1))[: size - 8]
        each = (made + number.to_bytes(8, "little") for number in range(CACHES))
        return _written_and_read(engine, each)


def many_states(location: str, many: int, blob: bytes, step: Callable[[str], object] = lambda label: None) -> ManyStates:
    """Store `many` states of the size of `blob`, list them and let them expire. Then fork one state `many` times, and list, read and delete
    the forks. `step` is called with the name of each step when it begins."""
    process, took = psutil.Process(), {}

    def told(label: str, calls: Iterator[Callable[[], object]]) -> None:
        step(label)
        times = [_took(call) for call in calls]
        took[label] = {"p50": statistics.median(times), "most": max(times)}

    def store(number: int) -> object:
        record = replace(new_record("bench", "f"), expires=time.time() + _LIFE_S)
        return engine.put(record, blob[:-8] + number.to_bytes(8, "little"), quota=ROOM)

    with _opened(location) as engine:
        before = process.memory_info().rss
        told("stored", (partial(store, number) for number in range(many)))
        told(f"listed, a page of {PAGE}", (partial(engine.page, "", Filter(limit=PAGE)) for _ in range(100)))
        told(f"listed, all pages of {PAGE}", iter([partial(_pages, engine)]))
    with _opened(location, ahead_s=2 * _LIFE_S) as engine:
        told(f"expired, calls of up to {SWEPT}", (engine.sweep for _ in iter(lambda: engine.totals().states, 0)))
    with _opened(location) as engine:
        parent = engine.put(new_record("bench", "f"), blob, quota=ROOM)
        forks = [replace(new_record("bench", "f"), parent=parent.id, origin="fork") for _ in range(many)]
        told("forked from one parent", (partial(engine.put, fork, None, quota=ROOM) for fork in forks))
        blobs = sum(1 for _ in engine.blobs())
        told(f"forks listed, a page of {PAGE}", (partial(engine.children, "", parent.id, PAGE) for _ in range(100)))
        told("blob of a fork read", (partial(engine.blob, "", fork.id) for fork in forks[:: max(many // 100, 1)]))
        memory = process.memory_info().rss - before
        told("deleted", (partial(engine.delete, "", each.id) for each in (*forks, parent)))
        while engine.sweep():
            pass
    return ManyStates(took, memory / 2**20, blobs)


def new_record(model: str, fingerprint: str) -> StateRecord:
    now = time.time()
    return StateRecord(
        id=new_state_id(),
        tenant="",
        model=model,
        fingerprint=fingerprint,
        numerics="0",
        position=1,
        parent=None,
        origin="prompt",
        created=now,
        used=now,
    )


def _written_and_read(engine: GroupingEngine, blobs: "Iterator[bytes] | list[bytes]") -> dict[str, dict[str, float]]:
    records, writes = [], []
    for blob in blobs:
        records.append(new_record("bench", "f"))
        writes.append(_took(partial(engine.put, records[-1], blob, quota=ROOM)))
    reads = [_took(partial(engine.blob, "", record.id)) for record in records]
    for record in records:
        engine.delete("", record.id)
    cuts = {what: statistics.quantiles(each, n=100, method="inclusive") for what, each in (("write", writes), ("read", reads))}
    return {what: {"p50": each[49], "p99": each[98]} for what, each in cuts.items()}


def _pages(engine: GroupingEngine) -> int:
    """List all states page by page, and return their number."""
    states, after = 0, None
    while page := engine.page("", Filter(limit=PAGE, after=after)):
        states, after = states + len(page), page[-1].id
    return states


@contextmanager
def _opened(location: str, ahead_s: float = 0.0) -> Iterator[GroupingEngine]:
    """Open the store at `location`, and close it at the end of the `with` block. Its clock is `ahead_s` seconds ahead."""

    def clock() -> float:
        return time.time() + ahead_s

    engine: GroupingEngine
    if "://" in location:
        from service.states.redis import RedisEngine  # imported here, because redis is an optional dependency

        engine = RedisEngine(location, clock=clock)
    else:
        engine = SqliteEngine(Path(location), clock=clock)
    try:
        yield engine
    finally:
        engine.close()


def _took(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)
