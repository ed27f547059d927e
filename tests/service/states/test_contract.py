"""What every engine of states promises, on all of them."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from service.errors import DocumentMoved, KeyReused, NameMoved, QuotaExceeded, StateGone, StateNotFound
from service.states.engine import SWEPT, StateEngine
from service.states.record import (
    DOCUMENT_BYTES,
    Document,
    Filter,
    Fork,
    IdempotencyKey,
    NameChange,
    Patch,
    Quota,
    StateRecord,
    Usage,
    new_state_id,
)
from service.states.sqlite import SqliteEngine
from tests.service.states.conftest import Clock

AMPLE = Quota(states=1_000, size=10**9)


def record(clock: Clock, tenant: str = "acme", **fields: Any) -> StateRecord:
    given: dict[str, Any] = {"position": 7, "parent": None, "origin": "prompt"} | fields
    times = {"created": clock.now, "used": clock.now}
    return StateRecord(id=new_state_id(), tenant=tenant, model="m", fingerprint="f", numerics="n", **times, **given)


def document(id: str = "resp_1", body: bytes = b"{}", **fields: Any) -> Document:
    return Document(**({"kind": "response", "id": id, "tenant": "acme", "body": body} | fields))


def test_a_state_comes_back_as_it_was_put(engine: StateEngine, clock: Clock) -> None:
    new = record(clock, metadata={"topic": 'a "quoted" one'}, pinned=True, turn="user")
    kept = engine.put(new, b"tensors", quota=AMPLE)
    assert (kept.metadata, kept.pinned, kept.size, kept.position, kept.status) == (new.metadata, True, 7, 7, "ready")
    assert kept.turn == "user"
    assert engine.get("acme", new.id) == kept
    assert engine.blob("acme", new.id) == b"tensors"


def test_a_group_inside_a_group_is_undone_together(engine: StateEngine, clock: Clock) -> None:
    """Redis keeps the calls before the one that fails."""
    kept, undone = record(clock), record(clock)

    def fail() -> None:
        with engine.group():
            engine.put(undone, b"2", quota=AMPLE)
            engine.move("acme", NameChange("doc", 3), kept.id)

    with engine.group():
        engine.put(kept, b"1", quota=AMPLE)
        with pytest.raises(NameMoved):
            fail()
    states = [each.id for each in engine.page("acme", Filter())]
    assert states == ([kept.id] if isinstance(engine, SqliteEngine) else [undone.id, kept.id])


def test_a_state_is_there_after_the_store_was_opened_again(opened: Callable[[], StateEngine], clock: Clock) -> None:
    small, large = record(clock), record(clock)
    engine = opened()
    contents = {small.id: b"s", large.id: np.random.default_rng(0).bytes(2_000_000)}
    for each in (small, large):
        engine.put(each, contents[each.id], quota=AMPLE)
    again = opened()
    assert {state: again.blob("acme", state) for state in contents} == contents


def test_a_foreign_state_is_a_missing_state(engine: StateEngine, clock: Clock) -> None:
    mine = engine.put(record(clock), b"x", quota=AMPLE, name=NameChange("doc"), key=IdempotencyKey("k", "d"))
    calls: list[Callable[[str], Any]] = [
        lambda state: engine.get("other", state),
        lambda state: engine.use("other", state),
        lambda state: engine.blob("other", state),
        lambda state: engine.change("other", state, Patch(pinned=True)),
        lambda state: engine.delete("other", state),
        lambda state: engine.lineage("other", state),
        lambda state: engine.move("other", NameChange("doc"), state),
        lambda state: engine.put(record(clock, "other", parent=state, origin="fork"), None, quota=AMPLE),
        lambda state: engine.page("other", Filter(after=state)),
    ]
    for call in calls:
        refusals = []
        for state in (mine.id, "state_" + "0" * 32):
            with pytest.raises(StateNotFound) as refusal:
                call(state)
            refusals.append(str(refusal.value).replace(state, "ID"))
        assert refusals[0] == refusals[1]
    with pytest.raises(StateNotFound):
        engine.name("other", "doc")
    assert engine.names("other", mine.id) == []
    assert engine.page("other", Filter()) == []
    assert engine.answered("other", IdempotencyKey("k", "d")) is None
    assert engine.usage("other") == Usage()
    assert engine.get("acme", mine.id) == mine


def test_forks_share_one_blob(engine: StateEngine, clock: Clock) -> None:
    parent = engine.put(record(clock), bytes(1000), quota=AMPLE)
    forks = [engine.put(record(clock, parent=parent.id, origin="fork"), None, quota=AMPLE) for _ in range(20)]
    assert engine.usage("acme") == Usage(21, 1000, 0)
    assert engine.get("acme", forks[0].id).shared_by == 21
    engine.delete("acme", parent.id)
    assert engine.blob("acme", forks[3].id) == bytes(1000)
    for fork in forks:
        engine.delete("acme", fork.id)
    assert engine.usage("acme") == Usage(0, 0, 0)


def test_equal_bytes_of_two_tenants_count_for_both(engine: StateEngine, clock: Clock) -> None:
    one, two = (engine.put(record(clock, tenant), b"equal", quota=AMPLE) for tenant in ("acme", "other"))
    assert (one.shared_by, two.shared_by) == (1, 1)
    assert engine.usage("acme") == engine.usage("other") == Usage(1, 5, 0)
    engine.delete("acme", one.id)
    assert engine.blob("other", two.id) == b"equal"


def test_a_name_moves_by_compare_and_set(engine: StateEngine, clock: Clock) -> None:
    first = engine.put(record(clock), b"1", quota=AMPLE, name=NameChange("doc", 0))
    second = engine.put(record(clock, parent=first.id, origin="continuation"), b"2", quota=AMPLE, name=NameChange("doc", 1))
    assert engine.name("acme", "doc") == ("doc", second.id, 2)
    loser = record(clock, parent=first.id, origin="continuation")
    with pytest.raises(NameMoved, match="has version 2, and the request expects version 1"):
        engine.put(loser, b"3", quota=AMPLE, name=NameChange("doc", 1))
    with pytest.raises(StateNotFound):
        engine.get("acme", loser.id)  # refused as a whole
    with pytest.raises(NameMoved):
        engine.move("acme", NameChange("doc", 0), first.id)
    with pytest.raises(NameMoved, match="does not exist"):
        engine.move("acme", NameChange("new", 3), first.id)
    assert engine.move("acme", NameChange("doc"), first.id) == ("doc", first.id, 3)
    with pytest.raises(NameMoved):
        engine.unname("acme", NameChange("doc", 2))
    engine.unname("acme", NameChange("doc", 3))
    with pytest.raises(StateNotFound):
        engine.name("acme", "doc")
    assert engine.usage("acme").states == 2


@pytest.mark.parametrize("ended", ["unnamed", "deleted", "evicted", "expired"])
def test_a_version_of_a_name_is_never_used_again(engine: StateEngine, clock: Clock, ended: str) -> None:
    """A client has read version 1 of a name. Another client deletes the name and makes it again. Then the first one must not change it."""
    first = engine.put(record(clock, expires=clock.now + 60), b"1", quota=AMPLE, name=NameChange("doc", 0))
    read = engine.move("acme", NameChange("doc"), first.id)
    if ended == "unnamed":
        engine.unname("acme", NameChange("doc"))
    elif ended == "deleted":
        engine.delete("acme", first.id)
    elif ended == "evicted":
        clock.now += 1
        engine.put(record(clock), b"2", quota=Quota(states=1, size=10**6))
    else:
        clock.now += 61
        engine.sweep()
    second = engine.put(record(clock), b"3", quota=AMPLE, name=NameChange("doc", 0))
    assert engine.name("acme", "doc").version > read.version
    for call in (
        lambda: engine.move("acme", NameChange("doc", read.version), second.id),
        lambda: engine.unname("acme", NameChange("doc", read.version)),
        lambda: engine.put(record(clock), b"4", quota=AMPLE, name=NameChange("doc", read.version)),
    ):
        with pytest.raises(NameMoved):
            call()
    assert engine.name("acme", "doc").state == second.id
    assert engine.move("other", NameChange("doc", 0), engine.put(record(clock, "other"), b"5", quota=AMPLE).id).version == 1


def test_the_names_of_a_tenant_are_bounded(engine: StateEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.states.rows.MOST_NAMES", 3)
    states = [engine.put(record(clock), b"%d" % at, quota=AMPLE, name=NameChange(f"name {at}")) for at in range(3)]
    refused: list[Callable[[], object]] = [
        lambda: engine.put(record(clock), b"3", quota=AMPLE, name=NameChange("new")),
        lambda: engine.change("acme", states[0].id, Patch(pinned=True), name=NameChange("new")),
        lambda: engine.move("acme", NameChange("new"), states[0].id),
    ]
    for call in refused:
        with pytest.raises(QuotaExceeded, match="has 3 names, the limit, and 'new' would be another one: move an existing name"):
            call()
    assert engine.page("acme", Filter()) == states[::-1], "a refusal changes nothing"
    assert engine.move("acme", NameChange("name 0"), states[1].id).version == 2
    assert engine.move("other", NameChange("new"), engine.put(record(clock, "other"), b"5", quota=AMPLE).id).version == 1
    engine.delete("acme", states[1].id)
    for name in ("new", "name 0"):
        engine.move("acme", NameChange(name), states[0].id)


def test_a_change_and_a_move_of_a_name_are_one_call(engine: StateEngine, clock: Clock) -> None:
    first = engine.put(record(clock), b"1", quota=AMPLE, name=NameChange("doc", 0))
    second = engine.put(record(clock), b"2", quota=AMPLE)
    patch = Patch(expires=clock.now + 60, pinned=True, metadata={"a": "b"})
    for refused in ({"name": NameChange("doc", 0)}, {"guard": NameChange("doc", 2)}, {"guard": NameChange("none", 1)}):
        with pytest.raises(NameMoved):
            engine.change("acme", second.id, patch, **refused)
        assert engine.get("acme", second.id) == second
    with pytest.raises(StateNotFound):
        engine.change("acme", "state_" + "0" * 32, patch, name=NameChange("doc", 1))
    assert engine.name("acme", "doc") == ("doc", first.id, 1)
    changed = engine.change("acme", second.id, patch, name=NameChange("doc", 1))
    assert (changed.pinned, changed.expires, changed.metadata) == (True, clock.now + 60, {"a": "b"})
    assert engine.name("acme", "doc") == ("doc", second.id, 2)
    assert engine.names("acme", first.id) == []
    assert engine.change("acme", second.id, Patch(pinned=False), guard=NameChange("doc", 2)).pinned is False
    assert engine.name("acme", "doc").version == 2


def test_a_state_is_deleted_only_at_the_expected_version_of_its_name(engine: StateEngine, clock: Clock) -> None:
    state = engine.put(record(clock), b"1", quota=AMPLE, name=NameChange("doc", 0))
    with pytest.raises(NameMoved):
        engine.delete("acme", state.id, NameChange("doc", 2))
    assert engine.get("acme", state.id) == state
    engine.delete("acme", state.id, NameChange("doc", 1))
    assert engine.usage("acme") == Usage()


def test_forks_of_one_call_are_all_made_or_none(engine: StateEngine, clock: Clock) -> None:
    parent = engine.put(record(clock), bytes(100), quota=AMPLE)
    clock.now += 1
    other = engine.put(record(clock), b"other", quota=AMPLE)
    clock.now += 1

    def forks(count: int, key: str, digest: str = "d") -> list[Fork]:
        new = [record(clock, parent=parent.id, origin="fork") for _ in range(count)]
        return [Fork(each, IdempotencyKey(f"{key} {at}", digest)) for at, each in enumerate(new)]

    first = engine.fork(forks(3, "k"), AMPLE)
    assert [each.shared_by for each in first] == [4, 4, 4]
    assert engine.usage("acme") == Usage(5, 105, 0)
    assert engine.fork(forks(3, "k"), AMPLE) == first, "a repeated call makes nothing"
    before = [each.id for each in engine.page("acme", Filter())]
    refused: list[tuple[type[Exception], list[Fork], Quota]] = [
        (QuotaExceeded, forks(3, "l"), Quota(states=2, size=10**6)),
        (KeyReused, [*forks(1, "m"), *forks(2, "k", "another")], AMPLE),
        (StateNotFound, [Fork(record(clock, parent="state_" + "0" * 32, origin="fork"))], AMPLE),
    ]
    for error, asked, quota in refused:
        with pytest.raises(error):
            engine.fork(asked, quota)
        assert [each.id for each in engine.page("acme", Filter())] == before
        assert engine.usage("acme") == Usage(5, 105, 0)
    engine.fork(forks(2, "n"), Quota(states=6, size=10**6))
    assert engine.get("acme", parent.id).shared_by == 6, "the parent does not give way to its forks"
    with pytest.raises(StateGone, match="evicted"):
        engine.get("acme", other.id)


def test_a_repeated_request_makes_one_state(engine: StateEngine, clock: Clock) -> None:
    first = engine.put(record(clock), b"1", quota=AMPLE, key=IdempotencyKey("k:1", "digest"))
    again = engine.put(record(clock), b"1", quota=AMPLE, key=IdempotencyKey("k:1", "digest"))
    assert again == first
    assert engine.answered("acme", IdempotencyKey("k:1", "digest")) == first
    assert engine.usage("acme").states == 1
    with pytest.raises(KeyReused):
        engine.put(record(clock), b"2", quota=AMPLE, key=IdempotencyKey("k:1", "other digest"))
    clock.now += 86_401
    engine.sweep()
    assert engine.answered("acme", IdempotencyKey("k:1", "digest")) is None


def test_a_state_that_is_put_again_stays_as_it_is(engine: StateEngine, clock: Clock) -> None:
    """A generator was lost after it had stored a state, so another one stores it again, or the first one does so later."""
    first = engine.put(record(clock), b"1", ids=b"ids_", quota=AMPLE, name=NameChange("doc", 0))
    fork = engine.put(record(clock, parent=first.id, origin="fork"), None, quota=AMPLE)
    before, clock.now = engine.usage("acme"), clock.now + 1
    with engine.group():
        other = engine.put(record(clock), b"2", quota=AMPLE)
        assert engine.put(first, b"1", ids=b"ids_", quota=AMPLE, name=NameChange("doc", 0)).id == first.id
        assert engine.put(fork, None, quota=AMPLE).id == fork.id
    assert engine.get("acme", other.id).size == 1, "the rest of the group is not affected"
    assert engine.name("acme", "doc") == ("doc", first.id, 1)
    assert engine.usage("acme").states == before.states + 1
    engine.delete("acme", first.id)
    with pytest.raises(StateNotFound):
        engine.put(first, b"1", quota=AMPLE)


def test_pages_are_whole_and_newest_first(engine: StateEngine, clock: Clock) -> None:
    states = [engine.put(record(clock, metadata={"even": str(at % 2 == 0)}), b"%d" % at, quota=AMPLE).id for at in range(7)]
    found: list[str] = []
    while page := engine.page("acme", Filter(limit=3, after=found[-1] if found else None)):
        found += [each.id for each in page]
    assert found == states[::-1]
    assert [each.id for each in engine.page("acme", Filter(metadata=(("even", "True"),)))] == states[::-1][::2]
    assert engine.page("acme", Filter(metadata=(("even'\"] --", "True"),))) == []
    engine.move("acme", NameChange("doc"), states[2])
    assert [each.id for each in engine.page("acme", Filter(name="doc"))] == [states[2]]
    assert engine.page("acme", Filter(model="another")) == []
    fork = engine.put(record(clock, parent=states[0], origin="fork"), None, quota=AMPLE).id
    assert [each.id for each in engine.page("acme", Filter(origin="fork"))] == [fork]


def test_a_lineage_survives_the_deletion_of_an_ancestor(engine: StateEngine, clock: Clock) -> None:
    root = engine.put(record(clock, position=2), b"1", ids=b"\1\0\0\0\2\0\0\0", quota=AMPLE)
    middle = engine.put(record(clock, parent=root.id, origin="continuation", position=3), b"2", ids=b"\3\0\0\0", quota=AMPLE)
    leaf = engine.put(record(clock, parent=middle.id, origin="continuation", position=4), b"3", ids=b"\4\0\0\0", quota=AMPLE)
    engine.delete("acme", middle.id)
    engine.sweep()
    line = engine.lineage("acme", leaf.id)
    assert [(each.record.id, each.record.status) for each in line] == [(leaf.id, "ready"), (middle.id, "deleted"), (root.id, "ready")]
    assert b"".join(each.ids for each in reversed(line)) == np.arange(1, 5, dtype="<i4").tobytes()
    assert engine.lineage("acme", leaf.id, 2) == line[:2]
    engine.delete("acme", leaf.id)
    engine.sweep()
    assert [each.id for each in engine.page("acme", Filter())] == [root.id]


@pytest.mark.parametrize("why", ["deleted", "evicted", "expired"])
def test_a_state_that_is_gone_keeps_only_the_token_ids_of_its_descendants(engine: StateEngine, clock: Clock, why: str) -> None:
    fields = {"metadata": {"a": "b" * 1000}, "expires": clock.now + 60}
    parent, leaf = (engine.put(record(clock, **fields), blob, ids=b"\1\0\0\0", quota=AMPLE) for blob in (b"1", b"2"))
    child = record(clock, parent=parent.id, origin="continuation", pinned=True)
    engine.put(child, b"3", quota=AMPLE)
    if why == "deleted":
        for each in (parent, leaf):
            engine.delete("acme", each.id)
    elif why == "evicted":
        engine.write(document(), 0, Quota(states=9, size=DOCUMENT_BYTES + 10))
    else:
        clock.now += 61
        engine.sweep()
    kept = engine.rows("acme", [("state", parent.id), ("state", leaf.id)])
    assert [(each.status, each.metadata, each.ids_size) for each in kept] == [(why, {}, 4), (why, {}, 0)]
    assert [each.ids for each in engine.lineage("acme", child.id)] == [b"", b"\1\0\0\0"]


def test_metadata_and_token_ids_count_for_the_quota(opened: Callable[[], StateEngine], clock: Clock) -> None:
    engine = opened()
    first = engine.put(record(clock, metadata={"a": "é"}), b"123", ids=bytes(40), quota=AMPLE)
    counted = 3 + 40 + len('"a":"é"'.encode())
    assert engine.usage("acme") == opened().usage("acme") == Usage(1, counted, 0)
    with pytest.raises(QuotaExceeded, match=r"1 states of 1043 bytes"):
        engine.put(record(clock, metadata={"a": "b" * 34}), b"123", ids=bytes(1000), quota=Quota(states=9, size=1042))
    engine.change("acme", first.id, Patch(metadata={}))
    fork = engine.put(record(clock, parent=first.id, origin="fork", metadata={"a": "b"}), None, quota=AMPLE)
    assert engine.usage("acme") == Usage(2, 50, 0)
    engine.delete("acme", first.id)
    engine.delete("acme", fork.id)
    assert engine.usage("acme") == Usage()


def test_what_stays_of_states_that_are_gone_is_bounded(engine: StateEngine, clock: Clock) -> None:
    """As many rows as a tenant may have states, and a sixteenth of its bytes of token ids. The oldest ones are deleted."""
    quota, made = Quota(states=4, size=1600), list[StateRecord]()
    for at in range(20):
        clock.now += 1
        made.append(engine.put(record(clock), b"%d" % at, quota=quota, key=IdempotencyKey(f"key {at}", "d")))
    assert rows(engine) == 4 + 4 + 4, "states, gone states and keys"
    for state, error in ((made[11], StateNotFound), (made[12], StateGone)):
        with pytest.raises(error):
            engine.get("acme", state.id)
    assert [engine.answered("acme", IdempotencyKey(f"key {at}", "d")) for at in (15, 16)] == [None, made[16]]
    parent = None
    for at in range(20):
        clock.now += 1
        parent = engine.put(record(clock, parent=parent, origin="continuation"), b"%d" % at, ids=bytes(40), quota=quota).id
    assert len(engine.lineage("acme", parent or "")) == 4 + 2
    assert rows(engine) == 4 + 2 + 4
    clock.now += 86_401
    while engine.sweep():
        pass
    for each in engine.page("acme", Filter()):
        engine.delete("acme", each.id)
    while engine.sweep():
        pass
    assert rows(engine) == 0


def test_a_state_expires_by_the_clock(engine: StateEngine, clock: Clock) -> None:
    state = engine.put(record(clock, expires=clock.now + 60), b"1", quota=AMPLE, name=NameChange("doc"))
    forever = engine.put(record(clock, expires=clock.now + 60), b"2", quota=AMPLE)
    engine.change("acme", forever.id, Patch(expires=math.inf))
    clock.now += 61
    with pytest.raises(StateGone, match="expired"):
        engine.get("acme", state.id)  # before any sweep
    assert [each.id for each in engine.page("acme", Filter())] == [forever.id]
    engine.sweep()
    assert engine.usage("acme") == Usage(1, 1, 0)
    with pytest.raises(StateGone, match="expired"):
        engine.blob("acme", state.id)
    clock.now += 86_401
    engine.sweep()
    with pytest.raises(StateNotFound):
        engine.get("acme", state.id)


def rows(engine: Any) -> int:
    """How many states, keys and documents the store has, also those that are gone."""
    if isinstance(engine, SqliteEngine):
        return sum(engine._db.execute(f"SELECT count(*) FROM {table}").get for table in ("states", "keys", "documents"))
    return sum(sum(1 for _ in engine._redis.scan_iter(f"*:{kind}:*", count=10_000)) for kind in ("state", "key", "doc"))


def test_one_call_of_a_sweep_takes_a_bounded_number_of_rows(engine: StateEngine, clock: Clock) -> None:
    """Other calls wait during a call."""
    for tenant in ("acme", "other"):
        parent = engine.put(record(clock, tenant, expires=clock.now + 60), b"1", quota=AMPLE)
        forks = [record(clock, tenant, parent=parent.id, origin="fork", expires=clock.now + 60) for _ in range(SWEPT)]
        engine.fork([Fork(each, IdempotencyKey(each.id, "d")) for each in forks], AMPLE)
        for at in range(SWEPT + 1):
            engine.write(document(f"resp_{at}", tenant=tenant, expires=clock.now + 60), 0, AMPLE)

    def swept(count: Callable[[], int]) -> list[int]:
        counts, more = [count()], True
        while more:
            more = engine.sweep()
            counts.append(count())
        return [before - after for before, after in pairwise(counts)]

    clock.now += 61
    taken = swept(
        lambda: sum(engine.usage(tenant).states + engine.usage(tenant).size // (DOCUMENT_BYTES + 2) for tenant in ("acme", "other"))
    )
    assert max(taken) <= SWEPT
    assert engine.totals() == Usage()
    clock.now += 86_401
    taken = swept(lambda: rows(engine))
    assert max(taken) <= SWEPT
    assert rows(engine) == 0, "also the parent, which is deleted after its forks"


def test_a_long_line_of_deleted_states_is_swept_in_parts(engine: StateEngine, clock: Clock) -> None:
    """The row of a deleted state stays for its child, so the last one that is deleted takes all others along."""
    line: list[str] = []
    for at in range(SWEPT + 2):
        parent = line[-1] if line else None
        line += [engine.put(record(clock, parent=parent, position=at), b"%d" % at, quota=AMPLE).id]
    for each in line[:-1]:
        engine.delete("acme", each)
    while engine.sweep():
        pass
    assert rows(engine) == SWEPT + 2, "the child needs them all"
    engine.delete("acme", line[-1])
    assert engine.sweep()
    assert rows(engine) == 2
    assert not engine.sweep()
    assert rows(engine) == 0


def test_the_state_that_was_used_least_recently_makes_room(engine: StateEngine, clock: Clock) -> None:
    quota, states = Quota(states=3, size=10**6), []
    for at in range(3):
        clock.now += 1
        states.append(engine.put(record(clock), b"%d" % at, quota=quota).id)
    for use, state in ((engine.blob, states[0]), (engine.use, states[1])):
        clock.now += 1
        use("acme", state)
    clock.now += 1
    newest = engine.put(record(clock), b"new", quota=quota)
    with pytest.raises(StateGone, match="evicted"):
        engine.use("acme", states[2])
    assert {each.id for each in engine.page("acme", Filter())} == {*states[:2], newest.id}


def test_evicting_a_state_frees_no_bytes_that_the_new_state_shares(engine: StateEngine, clock: Clock) -> None:
    for size in (600, 300):
        clock.now += 1
        engine.put(record(clock), bytes(size), quota=AMPLE)
    with pytest.raises(QuotaExceeded, match=r"1 states of 600 bytes.* 10 of 500 bytes"):
        engine.put(record(clock), bytes(600), quota=Quota(states=10, size=500))
    assert engine.usage("acme") == Usage(2, 900, 0)


def test_pinned_states_are_never_evicted_and_a_refusal_has_the_numbers(engine: StateEngine, clock: Clock) -> None:
    quota = Quota(states=100, size=1000)
    pinned = engine.put(record(clock, pinned=True), bytes(900), quota=quota)
    before = engine.usage("acme")
    assert before == Usage(1, 900, 900)
    assert engine.blob("acme", pinned.id) == bytes(900)  # a use changes nothing in that
    with pytest.raises(QuotaExceeded, match=r"2 states of 1100 bytes.* 100 of 1000 bytes"):
        engine.put(record(clock), b"1" * 200, quota=quota)
    assert engine.usage("acme") == before
    engine.change("acme", pinned.id, Patch(pinned=False))
    engine.put(record(clock), b"1" * 200, quota=quota)
    assert engine.usage("acme") == Usage(1, 200, 0)


def test_the_quota_of_one_tenant_evicts_nothing_of_another(engine: StateEngine, clock: Clock) -> None:
    other = engine.put(record(clock, "other"), bytes(900), quota=AMPLE)
    for _ in range(5):
        clock.now += 1
        engine.put(record(clock), np.random.default_rng(int(clock.now)).bytes(900), quota=Quota(states=10, size=1000))
    assert engine.get("other", other.id).status == "ready"
    assert engine.usage("acme").states == 1


class TestDocuments:
    def test_a_document_comes_back_as_it_was_written(self, opened: Callable[[], StateEngine], clock: Clock) -> None:
        engine, body = opened(), bytes(range(256))
        assert engine.write(document(body=body, due=clock.now + 1.5, expires=clock.now + 60.25, version=7), 0, AMPLE) == 1
        written = document(body=body, due=clock.now + 1.5, expires=clock.now + 60.25, version=1)
        assert engine.read("acme", "response", "resp_1") == written
        assert opened().read("acme", "response", "resp_1") == written

    def test_a_document_is_written_by_compare_and_set(self, engine: StateEngine) -> None:
        assert engine.write(document(body=b"1"), 0, AMPLE) == 1
        assert engine.write(document(body=b"2", due=5.0), 1, AMPLE) == 2
        for expected in (0, 1, 3):
            with pytest.raises(DocumentMoved, match=f"response resp_1 has version 2, and the request expects version {expected}"):
                engine.write(document(body=b"3"), expected, AMPLE)
            with pytest.raises(DocumentMoved):
                engine.erase("acme", "response", "resp_1", expected)
        with pytest.raises(DocumentMoved, match="response resp_2 does not exist"):
            engine.write(document("resp_2"), 1, AMPLE)
        assert engine.read("acme", "response", "resp_1") == document(body=b"2", due=5.0, version=2)
        assert engine.write(document(body=b"4"), None, AMPLE) == 3
        assert engine.read("acme", "response", "resp_1") == document(body=b"4", version=3)
        engine.erase("acme", "response", "resp_1", 3)
        with pytest.raises(StateNotFound, match="there is no response resp_1"):
            engine.read("acme", "response", "resp_1")
        with pytest.raises(StateNotFound, match="there is no response resp_1"):
            engine.erase("acme", "response", "resp_1", None)

    def test_a_foreign_document_is_a_missing_document(self, engine: StateEngine) -> None:
        engine.write(document(), 0, AMPLE)
        for tenant, kind in (("other", "response"), ("acme", "run")):
            with pytest.raises(StateNotFound):
                engine.read(tenant, kind, "resp_1")
            with pytest.raises(StateNotFound):
                engine.erase(tenant, kind, "resp_1", None)
            with pytest.raises(StateNotFound):
                engine.documents(tenant, kind, "resp_1", 5)
            assert engine.documents(tenant, kind, None, 5) == []
            assert engine.write(document(tenant=tenant, kind=kind, body=b"another"), 0, AMPLE) == 1
        assert engine.read("acme", "response", "resp_1") == document(version=1)

    def test_pages_of_documents_are_whole_and_in_the_order_of_their_first_write(self, engine: StateEngine) -> None:
        for at in range(7):
            engine.write(document(f"resp_{at}"), 0, AMPLE)
        engine.write(document("resp_2", b"again"), 1, AMPLE)
        found: list[str] = []
        while page := engine.documents("acme", "response", found[-1] if found else None, 3):
            found += [each.id for each in page]
        assert found == [f"resp_{at}" for at in reversed(range(7))]
        assert engine.documents("acme", "response", "resp_3", 1) == [document("resp_2", b"again", version=2)]

    def test_the_documents_of_all_tenants_are_found_when_they_are_due(self, engine: StateEngine, clock: Clock) -> None:
        for at, tenant in enumerate(["acme", "other", "acme", "third"]):
            engine.write(document(f"run_{at}", kind="run", tenant=tenant, due=clock.now + 10 - at), 0, AMPLE)
        engine.write(document("run_4", kind="run"), 0, AMPLE)  # never due
        engine.write(document("resp_5", due=clock.now), 0, AMPLE)
        assert engine.due("run", clock.now + 6.9, 10) == []
        assert [each.id for each in engine.due("run", clock.now + 9, 10)] == ["run_3", "run_2", "run_1"]
        assert [each.id for each in engine.due("run", clock.now + 9, 2)] == ["run_3", "run_2"]
        engine.write(document("run_3", kind="run", tenant="third", due=clock.now + 100), 1, AMPLE)  # its lease was renewed
        engine.write(document("run_2", kind="run"), 1, AMPLE)  # finished
        engine.erase("other", "run", "run_1", 1)
        assert [each.id for each in engine.due("run", clock.now + 50, 10)] == ["run_0"]

    def test_a_document_expires_by_the_clock(self, engine: StateEngine, clock: Clock) -> None:
        for at, expires in enumerate([clock.now + 60, clock.now + 60, None]):
            engine.write(document(f"resp_{at}", b"12345", due=clock.now, expires=expires), 0, AMPLE)
        clock.now += 61
        with pytest.raises(StateNotFound):
            engine.read("acme", "response", "resp_0")  # before any sweep
        with pytest.raises(StateNotFound):
            engine.erase("acme", "response", "resp_0", None)
        assert [each.id for each in engine.documents("acme", "response", None, 5)] == ["resp_2"]
        assert [each.id for each in engine.due("response", clock.now, 5)] == ["resp_2"]
        assert engine.write(document("resp_1", b"new"), 0, AMPLE) == 1
        assert [each.id for each in engine.documents("acme", "response", None, 5)] == ["resp_1", "resp_2"]
        assert engine.usage("acme").size == 3 * DOCUMENT_BYTES + 13
        engine.sweep()
        assert engine.usage("acme").size == 2 * DOCUMENT_BYTES + 8

    def test_a_refused_document_leaves_nothing(self, engine: StateEngine, clock: Clock) -> None:
        loose = engine.put(record(clock), b"1" * 60, quota=AMPLE)
        kept = engine.put(record(clock, pinned=True), bytes(40), quota=AMPLE)
        engine.write(document("resp_2", b""), 0, AMPLE)
        before, small = engine.usage("acme"), Quota(states=9, size=DOCUMENT_BYTES + 100)

        def write(expected: int | None, size: int, quota: Quota) -> None:
            with engine.group():  # as the store's thread does, where the group goes on after a refusal
                with pytest.raises((QuotaExceeded, DocumentMoved)):
                    engine.write(document(body=bytes(size), due=clock.now, expires=clock.now + 60), expected, quota)
                engine.write(document("resp_2", b""), None, quota)

        for expected, size, quota in ((0, 70, small), (None, 70, small), (1, 5, AMPLE)):
            write(expected, size, quota)
            with pytest.raises(StateNotFound):
                engine.read("acme", "response", "resp_1")
            assert [each.id for each in engine.documents("acme", "response", None, 5)] == ["resp_2"]
            assert engine.due("response", clock.now, 5) == []
            assert engine.usage("acme") == before
        assert {each.id for each in engine.page("acme", Filter())} == {loose.id, kept.id}
        assert engine.write(document(), 0, AMPLE) == 1

    def test_documents_of_one_call_are_all_written_or_none(self, engine: StateEngine, clock: Clock) -> None:
        """A response and its conversation: none is stored without the other, in Redis too."""
        engine.write(document("resp_1", b"1" * 10), 0, AMPLE)
        engine.put(record(clock, pinned=True), b"3" * 10, quota=AMPLE)
        new = [document("resp_1", bytes(20), due=clock.now), document("conv_1", bytes(50), kind="conversation")]
        before = engine.usage("acme")
        refused: list[tuple[type[Exception], str, tuple[int | None, int | None], Quota]] = [
            (QuotaExceeded, f"1 states of {80 + 2 * DOCUMENT_BYTES} bytes", (1, 0), Quota(states=9, size=79 + 2 * DOCUMENT_BYTES)),
            (DocumentMoved, "conversation conv_1 does not exist, and the request expects version 3", (1, 3), AMPLE),
            (DocumentMoved, "response resp_1 has version 1, and the request expects version 2", (2, None), AMPLE),
        ]
        for error, why, expected, quota in refused:
            with pytest.raises(error, match=why):
                engine.write_all(list(zip(new, expected, strict=True)), quota)
            assert engine.read("acme", "response", "resp_1") == document("resp_1", b"1" * 10, version=1)
            assert engine.documents("acme", "conversation", None, 5) == []
            assert engine.due("response", clock.now, 5) == []
            assert engine.usage("acme") == before
        assert engine.write_all(list(zip(new, (1, None), strict=True)), Quota(states=9, size=80 + 2 * DOCUMENT_BYTES)) == [2, 1]
        assert engine.read("acme", "response", "resp_1") == document("resp_1", bytes(20), due=clock.now, version=2)
        assert engine.read("acme", "conversation", "conv_1").body == bytes(50)
        assert engine.usage("acme") == Usage(1, 80 + 2 * DOCUMENT_BYTES, 10)

    def test_documents_count_for_the_quota(self, engine: StateEngine, clock: Clock) -> None:
        quota = Quota(states=10, size=1000 + DOCUMENT_BYTES)
        kept = engine.put(record(clock, pinned=True), bytes(400), quota=quota)
        clock.now += 1
        loose = engine.put(record(clock), b"1" * 200, quota=quota)
        engine.write(document(body=bytes(100)), 0, quota)
        assert engine.usage("acme") == Usage(2, 700 + DOCUMENT_BYTES, 400)
        engine.write(document(body=bytes(500)), 1, quota)
        with pytest.raises(StateGone, match="evicted"):
            engine.get("acme", loose.id)
        with pytest.raises(QuotaExceeded, match=r"1 states of 1513 bytes.* 10 of 1512 bytes"):
            engine.write(document(body=bytes(601)), 2, quota)
        with pytest.raises(QuotaExceeded):
            engine.put(record(clock), b"2" * 101, quota=quota)
        assert engine.read("acme", "response", "resp_1").body == bytes(500)
        assert engine.write(document(body=bytes(490)), 2, Quota(states=10, size=10)) == 3  # over its quota, but no longer by so much
        assert engine.usage("acme") == Usage(1, 890 + DOCUMENT_BYTES, 400)
        engine.erase("acme", "response", "resp_1", None)
        assert engine.usage("acme") == Usage(1, 400, 400)
        assert engine.get("acme", kept.id).pinned
