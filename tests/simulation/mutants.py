"""Bugs that other servers have shipped, and two of our own, each planted by replacing one function. The checks must find them all."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from service.errors import ServiceError, StateNotFound
from service.generation.decoding import Decoding
from service.generation.engine import GeneratorEngine
from service.generation.reopening import Reopening
from service.generation.saved.keeper import StateKeeper
from service.generation.sequence import Sequence
from service.generation.session import HostStates
from service.generation.slots import Row, Slots
from service.states import blob
from service.states.engine import StateEngine
from service.states.store import Store
from service.streams.lease import Lease, Put
from tests.simulation.gateways import simulate_gateways
from tests.simulation.plain import embedded
from tests.simulation.world import Result, simulate

Planted = AbstractContextManager[Any]


def stale_slot() -> Planted:
    """A row that had another owner before keeps that owner's state."""

    def add(self: Slots[Any], owner: Any, states: Any = None, position: int = 0) -> int:
        row, used = len(self.owners), self.__dict__.setdefault("used", set())
        if row not in used:
            _put(self, row, states)
        used.add(row)
        self.positions[row] = position
        self.owners.append(owner)
        return row

    return mock.patch.object(Slots, "add", add)


def slot_by_id() -> Planted:
    """The state is copied to the row `order % size`, even if another run has that row."""

    def add(self: Slots[Any], owner: Any, states: Any = None, position: int = 0) -> int:
        row = len(self.owners)
        _put(self, owner.order % self.size, states)
        self.positions[row] = position
        self.owners.append(owner)
        return row

    return mock.patch.object(Slots, "add", add)


def leak_on_cancel() -> Planted:
    """A run that is cancelled keeps its slot."""
    remove = Decoding.remove

    def mutant(self: Decoding, sequence: Sequence) -> None:
        if not sequence.run.cancelled:
            remove(self, sequence)

    return mock.patch.object(Decoding, "remove", mutant)


def resume_before_the_last_token() -> Planted:
    """A run that goes on elsewhere does not feed the last token that its reader has."""
    replay = Sequence.replay

    def mutant(self: Sequence, completion: tuple[int, ...]) -> None:
        replay(self, completion)
        self.tokens = self.tokens[: len(self.tokens) - bool(completion)]

    return mock.patch.object(Sequence, "replay", mutant)


def discarded_step() -> Planted:
    """A run that loses its slot keeps a state that was fed one more token, which was never sent."""
    hold = Decoding.hold

    def mutant(self: Decoding, sequence: Sequence) -> None:
        hold(self, sequence)
        assert sequence.state is not None
        assert sequence.state.logits is not None
        S, n = sequence.state.tensors
        advanced = np.float32(0.75) * S + embedded(int(sequence.state.logits.argmax()))
        sequence.state = replace(sequence.state, tensors=(advanced, n))

    return mock.patch.object(Decoding, "hold", mutant)


def wrong_row() -> Planted:
    """A row that is moved into a free row is copied to the row beside it."""
    copy = HostStates.copy

    def mutant(self: HostStates, row: int, source: HostStates, of: int) -> None:
        beside = row ^ 1 if source is self and row ^ 1 < len(self.arrays[0]) else row
        copy(self, beside, source, of)

    return mock.patch.object(HostStates, "copy", mutant)


def elements_for_bytes_in_blobs() -> Planted:
    """The offset of a tensor in a blob is read as a number of elements instead of bytes."""
    read_header = blob.read_header

    def mutant(first_bytes: bytes | memoryview) -> blob.Header:
        header = read_header(first_bytes)
        moved = {}
        for name, entry in header.entries.items():
            begin = entry.begin // entry.dtype.itemsize
            moved[name] = entry._replace(begin=begin, end=begin + entry.end - entry.begin)
        return replace(header, entries=moved)

    return mock.patch.object(blob, "read_header", mutant)


def elements_for_bytes_in_ids() -> Planted:
    """Only a quarter of a turn's token ids are stored, as if their number were a number of bytes."""
    keep = StateKeeper.keep

    def mutant(self: StateKeeper, wanted: Any, state: Any, origin: Any, fed: Any, stored: Any) -> None:
        class Cut(tuple[int, ...]):
            """The token ids. An array of them has only as many bytes as there are ids."""

            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                values = np.array(tuple(self), dtype)
                return values[: values.nbytes // values.itemsize**2] if dtype == np.dtype("<i4") else values

        keep(self, wanted, state, origin, Cut(fed), stored)

    return mock.patch.object(StateKeeper, "keep", mutant)


def grammar_restarted() -> Planted:
    """A run that continues in another process starts its grammar from the beginning."""
    replay = Sequence.replay

    def mutant(self: Sequence, completion: tuple[int, ...]) -> None:
        matcher, self.matcher = self.matcher, None
        replay(self, completion)
        self.matcher = matcher

    return mock.patch.object(Sequence, "replay", mutant)


def acknowledged_before_commit() -> Planted:
    """A write is acknowledged before its transaction is committed."""

    def mutant(self: Store, group: list[tuple[Callable[[StateEngine], Any], Future[Any]]]) -> None:
        try:
            with self._engine.group():
                for call, future in group:
                    try:
                        future.set_result(call(self._engine))
                    except ServiceError as error:
                        future.set_exception(error)
        except ServiceError:
            pass

    return mock.patch.object(Store, "_carry_out", mutant)


def zombie_accepted() -> Planted:
    """A gateway that wakes after its lease has expired overwrites the run's document, also if another one owns the run."""

    def mutant(self: Lease, engine: StateEngine, put: Put) -> None:
        put(engine, None)

    return mock.patch.object(Lease, "write", mutant)


def zombie_by_version() -> Planted:
    """A lease checks only the document's version, which is one too high after a write that was undone."""

    versions: dict[str, int] = {}

    def mutant(self: Lease, engine: StateEngine, put: Put) -> None:
        if (version := versions.get(self.owner)) is None:
            try:
                version = engine.read(self.tenant, self.kind, self.id).version
            except StateNotFound:
                version = 0
        put(engine, version)
        versions[self.owner] = version + 1

    return mock.patch.object(Lease, "write", mutant)


def doubled_tokens() -> Planted:
    """The process that continues a run sends tokens again that the reader already has."""

    def mutant(self: Reopening, request: Any, run: Any, progress: Any) -> Any:
        known = request.known + tuple(progress.token_ids[:-1])
        return replace(request, known=known, numerics=run.numerics, prompt_logprobs=None)

    return mock.patch.object(Reopening, "_going_on", mutant)


def failed_run_kept() -> Planted:
    """The state of a run that has failed is kept, as if its turn were complete."""
    fail = GeneratorEngine.fail

    def mutant(self: GeneratorEngine, jobs: Any, error: ServiceError) -> None:
        jobs = list(jobs)
        for job in jobs:
            if job.request.keep is not None and job in self._decoding.running.sequences:
                tensors, logits = self._decoding.running.copy(job)
                state = self._decoding.state(job, tensors, logits)
                fed = (job.request.prompt + tuple(job.completion))[: job.position - job.start]
                self._keeper.keep(job.request.keep, state, job.origin, fed, lambda failure: None)
        fail(self, jobs, error)

    return mock.patch.object(GeneratorEngine, "fail", mutant)


# Subject -> the simulation that shows its bugs, and the bugs; the first is the one that `make test` plants.
MUTANTS: dict[str, tuple[Callable[[int], Result], tuple[Callable[[], Planted], ...]]] = {
    "slots": (simulate, (discarded_step, stale_slot, slot_by_id, leak_on_cancel, wrong_row)),
    "runs that go on elsewhere": (simulate, (doubled_tokens, resume_before_the_last_token, grammar_restarted)),
    "what is kept": (simulate, (elements_for_bytes_in_ids, elements_for_bytes_in_blobs, failed_run_kept)),
    "commits": (simulate, (acknowledged_before_commit,)),
    "leases": (simulate_gateways, (zombie_by_version, zombie_accepted)),
}


def _put(slots: Slots[Any], row: int, states: Any) -> None:
    if isinstance(states, Row):
        slots._front.copy(row, states.slots._front, states.at, int(states.slots.positions[states.at]))
    else:
        slots._front.put(row, states)
