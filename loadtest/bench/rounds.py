"""What is measured, in which order.

A round starts the service, measures each kind of work with the bare runtime just before it, stops the service, starts the peer and measures
the same work with the same texts. No contestant runs while another is measured, but for the idle service beside the bare runtime.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadtest.bench import peers
from loadtest.common import memory, texts, wrk
from loadtest.common.server import Server, attnserve
from loadtest.errors import LoadtestError
from loadtest.in_process import bare

BULK_TEXTS = 2048
SHORT_BATCH = 32
SAME_MODEL = 0.999  # cosine: two fp32 runtimes on the same weights differ in the seventh digit


class Part(StrEnum):
    short = "short"
    mix = "mix"
    bulk = "bulk"
    memory = "memory"
    start = "start"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, and for how long each time."""

    bundle: Path
    model: str
    max_tokens: int
    rounds: int
    seconds: float
    parts: frozenset[Part]
    threads: int
    peer: Path | None
    seed: str = "attnserve"

    @property
    def loads(self) -> bool:
        """Any part in which a peer takes part."""
        return bool(self.parts & {Part.short, Part.mix, Part.bulk})

    @property
    def steps(self) -> int:
        """How often `Rounds.show` is called."""
        service = (
            1 + 3 * (Part.short in self.parts) + 3 * (Part.mix in self.parts) + 2 * (Part.bulk in self.parts) + (Part.memory in self.parts)
        )
        peer = 1 + 2 * (Part.short in self.parts) + 2 * (Part.mix in self.parts) + (Part.bulk in self.parts)
        return self.rounds * (service + peer * bool(self.peer and self.loads)) + 2 * (Part.memory in self.parts)


@dataclass
class Rounds:
    """Runs a plan; `measurements` fills with one entry for each thing measured: work, contestant, round, and its raw figures."""

    plan: Plan
    show: Callable[[str], None]
    measurements: list[dict[str, Any]] = field(default_factory=list)
    peer_failure: str | None = None
    _number: int = 0
    _vectors: list[list[float]] = field(default_factory=list)

    def run(self) -> None:
        for number in range(1, self.plan.rounds + 1):
            self._number = number
            self._show("attnserve", "starting")
            with attnserve(self.plan.bundle, self.plan.model) as server:
                self._service(server)
            if self.plan.peer and self.plan.loads and not self.peer_failure:
                self._show("infinity", "starting")
                try:
                    with peers.infinity(self.plan.peer) as server:
                        self._peer(server)
                except LoadtestError as error:
                    self.peer_failure = str(error)
        if Part.memory in self.plan.parts:
            self._show("attnserve --lean", "starting")
            with attnserve(self.plan.bundle, self.plan.model, lean=True) as server:
                self._record("start", "attnserve --lean", seconds=server.start_s)
                self._memory(server, "attnserve --lean")

    # Contestants -----------------------------------------------------------------------------------------------------------------------

    def _service(self, server: Server) -> None:
        plan = self.plan
        self._record("start", "attnserve", seconds=server.start_s)
        if plan.loads:
            self._warm(server)
        if Part.short in plan.parts:
            speed = self._bare_short("short")
            self._load(server, "short, 32 connections", texts.short, 32, speed)
            self._load(server, "short, 1 connection", texts.short, 1, speed)
        if Part.mix in plan.parts:
            costs = self._bare_mix()
            for connections in (32, 8):
                self._load(
                    server,
                    f"mix, {connections} connections",
                    texts.mixed,
                    connections,
                    bare.allowed_per_s(self._mix_tokens(), costs),
                    costs,
                )
        if Part.bulk in plan.parts:
            self._bare_short("bulk")
            self._bulk(server)
        if Part.memory in plan.parts:
            self._memory(server, "attnserve")
        if plan.loads and plan.peer:
            self._vectors = server.embed(texts.mixed(8, "the same model?"))

    def _peer(self, server: Server) -> None:
        plan = self.plan
        cosine = min(map(_cosine, self._vectors, server.embed(texts.mixed(8, "the same model?"))))
        self._record("the same model?", server.name, lowest_cosine=cosine)
        if cosine < SAME_MODEL:
            raise LoadtestError(f"infinity serves another model than the bundle: lowest cosine {cosine:.4f}. Install it with --checkpoint")
        self._warm(server)
        if Part.short in plan.parts:
            for connections, work in ((32, "short, 32 connections"), (1, "short, 1 connection")):
                self._load(server, work, texts.short, connections, self._latest(work)["per_s"])
        if Part.mix in plan.parts:
            for connections in (32, 8):
                work = f"mix, {connections} connections"
                self._load(server, work, texts.mixed, connections, self._latest(work)["per_s"])
        if Part.bulk in plan.parts:
            self._bulk(server)

    # Work ------------------------------------------------------------------------------------------------------------------------------

    def _bare_short(self, work: str) -> float:
        """Texts a second at batch 32, the better of spinning and not."""
        self._show("bare runtime", work)
        n = round(statistics.median(bare.token_counts(self.plan.bundle, texts.short(50, "length"))))
        batch, one = (SHORT_BATCH, n), (1, n)
        best = 0.0
        for spin, callers in ((False, 1), (True, 1), (False, self.plan.threads)):
            timings = self._bare([batch, one], self.plan.seconds / 4, spin, callers)
            raw = {"batch": timings[batch], "one": timings[one], "tokens": n}
            if callers == 1:
                self._record(work, "bare", spin=spin, **raw)
                best = max(best, timings[batch]["texts_per_s"])
            else:
                self._record(work, "bare, a caller for each thread", spin=spin, **raw)
        return best

    def _bare_mix(self) -> dict[int, float]:
        """Seconds of one text at each length, the better of spinning and not at each."""
        self._show("bare runtime", "mix, by length")
        shapes = bare.shapes_for_mix(self.plan.max_tokens)
        costs: dict[int, float] = {}
        for spin in (False, True):
            timings = self._bare(shapes, max(self.plan.seconds / 20, 0.1), spin)
            found = bare.cost_s({shape: timing["texts_per_s"] for shape, timing in timings.items()})
            self._record("mix", "bare", spin=spin, cost_s=found, batches={f"{b}x{n}": timing for (b, n), timing in timings.items()})
            costs = {n: min(cost, costs.get(n, cost)) for n, cost in found.items()}
        return costs

    def _bare(self, shapes: list[bare.Shape], seconds: float, spin: bool, callers: int = 1) -> dict[bare.Shape, bare.Timing]:
        return bare.measure(self.plan.bundle, shapes, threads=self.plan.threads, seconds=seconds, spin=spin, callers=callers)

    def _load(
        self,
        server: Server,
        work: str,
        prepare: Callable[[int, str], list[str]],
        connections: int,
        expected_per_s: float,
        costs: dict[int, float] | None = None,
    ) -> None:
        """One run of wrk. With `costs`, also what the bare runtime allows for the very texts that were sent."""
        self._show(server.name, work)
        prepared = prepare(int(3 * expected_per_s * self.plan.seconds) + 4 * connections + 100, f"{self.plan.seed} {self._number} {work}")
        before = server.shortcuts()
        load = wrk.run(server.url, [server.body(text) for text in prepared], connections=connections, seconds=self.plan.seconds)
        time.sleep(1)  # the service finishes what was on its way when wrk left
        problems = load.problems + _shortcut_problems(server, before, server.shortcuts())
        raw: dict[str, Any] = {"per_s": load.per_s, "per_s_at_most": load.per_s_at_most, "problems": problems, "wrk": load.__dict__}
        if costs:
            tokens = bare.token_counts(self.plan.bundle, prepared[: max(load.requests, 1)])
            raw |= {"allowed_per_s": bare.allowed_per_s(tokens, costs), "tokens_on_average": statistics.mean(tokens)}
        self._record(work, server.name, **raw)

    def _bulk(self, server: Server) -> None:
        self._show(server.name, f"one request of {BULK_TEXTS:,} texts")
        before = server.shortcuts()
        elapsed, answer = server.post(texts.short(BULK_TEXTS, f"{self.plan.seed} {self._number} bulk"))
        problems = _shortcut_problems(server, before, server.shortcuts())
        self._record("bulk", server.name, seconds=elapsed, per_s=BULK_TEXTS / elapsed, answer_bytes=len(answer), problems=problems)

    def _memory(self, server: Server, contestant: str) -> None:
        """After work: what the first requests make a process keep belongs to it."""
        self._show(contestant, "memory")
        server.post(texts.mixed(BULK_TEXTS // 8, f"{self.plan.seed} {self._number} memory"))
        time.sleep(2)
        pids = memory.tree(server.pid)
        before, started = memory.cpu_s(pids), time.perf_counter()
        time.sleep(3)
        cores = (memory.cpu_s(pids) - before) / (time.perf_counter() - started)
        processes = memory.measure(server.pid)
        total = sum(process.pss_bytes for process in processes)
        self._record("memory", contestant, pss_bytes=total, idle_cores=cores, processes=[process.__dict__ for process in processes])

    def _warm(self, server: Server) -> None:
        """Each contestant gets the same texts before it is measured."""
        server.post(texts.mixed(64, f"{self.plan.seed} {self._number} warm"))

    # Notes -----------------------------------------------------------------------------------------------------------------------------

    def _mix_tokens(self) -> list[int]:
        return bare.token_counts(self.plan.bundle, texts.mixed(len(texts.MIX), "lengths"))

    def _latest(self, work: str) -> dict[str, Any]:
        return next(entry for entry in reversed(self.measurements) if entry["work"] == work)

    def _record(self, work: str, contestant: str, **raw: Any) -> None:
        self.measurements.append({"round": self._number, "work": work, "contestant": contestant, **raw})

    def _show(self, contestant: str, doing: str) -> None:
        self.show(f"round {self._number}/{self.plan.rounds}: {contestant}, {doing}")


def _shortcut_problems(server: Server, before: float | None, after: float | None) -> list[str]:
    """The service must compute every text, and must be able to say so."""
    if server.name != "attnserve":
        return []
    if before is None or after is None:
        return ["/metrics does not count cache hits and joined inputs"]
    return [f"{after - before:.0f} texts came from the cache or joined others"] if after != before else []


def _cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
