"""Records what clients observed, and checks whether a correct service can have produced it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.errors import ServiceError
from service.generation.request import Delta
from service.generation.run import join
from service.states.blob import MOST_RECENT, unpack
from service.states.record import StateRecord
from service.states.sqlite import SqliteEngine
from tests.service.generation.fake_steps import VOCAB_SIZE, FakeSteps
from tests.simulation import plain
from tests.simulation.plain import Outcome

IDS = "<i4"  # dtype of the token ids in a lineage


@dataclass
class Kept:
    """A state that a client asked the service to keep."""

    id: str
    tenant: str
    ids: tuple[int, ...]  # all tokens that were fed to it, in order
    parent: str | None
    acknowledged: bool = False
    may_be_gone: bool = False  # a client asked to delete it


@dataclass
class NameOperation:
    """One operation on a name, with its beginning and end. `expected`: the version that a compare-and-set expects; None: a read."""

    begun: float
    ended: float
    expected: int | None
    version: int | None  # version after the move, or the version read; None: the operation failed, or its answer was lost
    state: str | None = None
    failed: bool = False  # it had no effect. False with `version` None: it may have taken effect at any time after its beginning


@dataclass
class History:
    """The states that clients kept, by id, and the operations on each name of a tenant."""

    kept: dict[str, Kept] = field(default_factory=dict)
    names: dict[tuple[str, str], list[NameOperation]] = field(default_factory=dict)

    def expect(self, state: Kept) -> None:
        self.kept[state.id] = state

    def of(self, tenant: str) -> list[Kept]:
        """The states that a client of this tenant may continue."""
        return [each for each in self.kept.values() if each.tenant == tenant and each.acknowledged and not each.may_be_gone]


def wrong_stream(deltas: Sequence[Delta], expected: Outcome) -> str | None:
    """Return why these are not the first deltas of the run, or None. Each token must be there exactly once, in order."""
    if not deltas:
        return None
    made = join(deltas)
    n = len(made.token_ids)
    if made.token_ids != expected.ids[:n]:
        return f"the tokens are {made.token_ids}, and the plain recurrence gives {expected.ids}"
    if not expected.text.startswith(made.text):
        return f"the text is {made.text!r}, and the plain one is {expected.text!r}"
    if made.logprobs != expected.logprobs[: len(made.logprobs)]:
        return f"the log-probabilities are {made.logprobs}, and the plain ones are {expected.logprobs}"
    if made.finish_reason is None:
        return None
    whole = Outcome(made.token_ids, made.text, made.logprobs, made.finish_reason, made.stop_reason)
    return None if whole == expected else f"the run ended as {whole}, and the plain one as {expected}"


def wrong_states(history: History, store: SqliteEngine, *, evicts: bool, lineages: bool) -> Iterator[str]:
    """Yield what is wrong with the states in a store. `evicts`: quotas are small, so states may be evicted. `lineages`: whether every
    state still has its ancestors."""
    rows = {row[0]: row[1:] for row in store._db.execute("SELECT id, tenant, status FROM states")}
    for state, (tenant, status) in rows.items():
        if (kept := history.kept.get(state)) is None or kept.tenant != tenant:
            yield f"{state} of {tenant} is in the store, and nobody has made it"
        elif status == "ready":
            yield from _wrong_state(kept, store, lineages)
    for kept in history.kept.values():
        status = rows.get(kept.id, ("", "missing"))[1]
        fine = {"ready", *(("evicted", "missing") if evicts else ()), *(("deleted", "missing") if kept.may_be_gone else ())}
        if kept.acknowledged and status not in fine:
            yield f"{kept.id} was acknowledged, and is {status}"
    yield from wrong_counts(store)


def _wrong_state(kept: Kept, store: SqliteEngine, lineages: bool) -> Iterator[str]:
    record = store.get(kept.tenant, kept.id)
    steps = FakeSteps()
    try:
        blob = unpack(store.blob(kept.tenant, kept.id), steps.decoder, VOCAB_SIZE, steps.fingerprint)
    except ServiceError as error:
        yield f"{kept.id} cannot be read: {error}"
        return
    S, n = plain.tensors(kept.ids)
    seen = np.packbits(np.isin(np.arange(VOCAB_SIZE), kept.ids), bitorder="little")
    checks = {
        "position": record.position == blob.position == len(kept.ids),
        "parent": record.parent == kept.parent,
        "tensors": np.array_equal(blob.tensors[0], S) and np.array_equal(blob.tensors[1], n),
        "logits": np.array_equal(blob.logits, plain.logits(S)),
        "seen tokens": np.array_equal(blob.seen, seen),
        "recent tokens": blob.recent == kept.ids[-MOST_RECENT:],
        "lineage": not lineages or _told(store, record) == kept.ids,
    }
    for what, right in checks.items():
        if not right:
            yield f"{kept.id} has a wrong {what}: it must be the state after {kept.ids}"


def _told(store: SqliteEngine, record: StateRecord) -> tuple[int, ...]:
    """Return the token ids of a lineage, oldest first."""
    line = store.lineage(record.tenant, record.id)
    return tuple(token for each in reversed(line) for token in np.frombuffer(each.ids, IDS).tolist())


def wrong_counts(store: SqliteEngine) -> Iterator[str]:
    """Yield the tenants whose recorded usage differs from the sum of the tables, and the blobs with a wrong number of references."""
    tables = store._db
    counted = {row[0]: row[1:] for row in tables.execute("SELECT tenant, states, size, pinned_size FROM tenants")}
    states = dict(tables.execute("SELECT tenant, count(*) FROM states WHERE status = 'ready' GROUP BY tenant"))
    of_blobs = dict(tables.execute("SELECT tenant, sum(size) FROM blobs GROUP BY tenant"))
    of_rows = dict(
        tables.execute("SELECT tenant, sum(length(metadata) - 2 + length(ids)) FROM states WHERE status = 'ready' GROUP BY tenant")
    )
    for tenant in sorted({*counted, *states, *of_blobs}):
        found = (states.get(tenant, 0), of_blobs.get(tenant, 0) + of_rows.get(tenant, 0), 0)  # metadata is "{}" where there is none
        if counted.get(tenant, (0, 0, 0)) != found:
            yield f"{tenant} has {found} states, bytes and pinned bytes, and is counted with {counted.get(tenant)}"
    for blob, refs, found in tables.execute("SELECT b.id, b.refs, (SELECT count(*) FROM states s WHERE s.blob = b.id) FROM blobs b"):
        if refs != found:
            yield f"blob {blob} counts {refs} references, and has {found}"


def wrong_name(operations: Iterable[NameOperation]) -> Iterator[str]:
    """Yield why these operations on one name, all of one register, are not linearizable.

    A compare-and-set that expects version v gives version v + 1, so versions order all that has succeeded: it remains to check that no
    version was given twice, that reads show what was written, and that the order agrees with time. Somebody whose operation has failed
    without a known result may have written the versions that nobody else has.
    """
    operations = list(operations)
    known = [each for each in operations if each.version is not None]
    moves = [each for each in known if each.expected is not None]
    unsure = [each for each in operations if each.version is None and not each.failed and each.expected is not None]
    by_version: dict[int, NameOperation] = {0: NameOperation(-1, -1, None, 0)}
    for move in moves:
        assert move.version is not None
        assert move.expected is not None
        if move.version != move.expected + 1:
            yield f"a move from version {move.expected} gave version {move.version}"
        if move.version in by_version:
            yield f"two moves gave version {move.version}: {move} and {by_version[move.version]}"
        by_version[move.version] = move
    refused = [each.expected + 1 for each in operations if each.failed and each.expected is not None]  # it was written, or a later one
    highest = max((*(each.version or 0 for each in known), *refused), default=0)
    for version in range(1, highest + 1):
        if version not in by_version and (may := next((each for each in unsure if each.expected == version - 1), None)) is None:
            yield f"nobody has written version {version}"
        elif version not in by_version:
            by_version[version] = NameOperation(may.begun, float("inf"), version - 1, version, None)  # type: ignore[union-attr]
    for each in known:
        written = by_version.get(each.version or 0)
        if each.expected is None and written is not None and written.state is not None and written.state != each.state:
            yield f"version {each.version} points to {each.state}, and was written with {written.state}"
        if written is not None and each.ended < written.begun:
            yield f"{each} shows version {each.version} before it was written"
    for earlier in known:
        for later in known:
            if earlier.ended < later.begun and (later.version or 0) < (earlier.version or 0) + (later.expected is not None):
                yield f"{later} comes after {earlier}, and shows an older version"
    for each in operations:  # a refused move implies that the name had another version at some time during it
        if each.failed and each.expected is not None:
            successor = by_version.get(each.expected + 1)
            if any(other.version == each.expected and other.ended < each.begun for other in known) and (
                successor is None or successor.begun > each.ended
            ):
                yield f"{each} was refused, although the version was {each.expected} all the time"
