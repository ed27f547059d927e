"""`attnserve bench`: compares the service with the bare runtime (ONNX Runtime without a server) and infinity-emb; see loadtest/README.md.

In each round the service starts, and each kind of work is measured with the bare runtime and then with the service. After that, infinity
does the same work on the same texts. Only one of them computes at a time: the service is idle while the bare runtime is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtest.bench import overhead, peers, runner
from loadtest.bench.overhead import Overhead
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common import machine, memory, texts, wrk
from loadtest.common.report import Bar, ReportRow
from loadtest.common.server import MeasuredServer, attnserve
from loadtest.common.terminal import chosen
from loadtest.errors import LoadtestError
from loadtest.in_process import bare
from service.terminal import command_app

BULK_TEXTS = 2048
SHORT_BATCH = 32
SAME_MODEL = 0.999  # smallest cosine of two servers' embeddings; with the same weights, fp32 runtimes differ in the seventh digit
MiB = 2**20
SERVICE, LEAN, PEER, BARE = "attnserve", "attnserve --lean", "infinity", "bare"
LOADS: dict[str, tuple[Callable[[int, str], list[str]], tuple[int, ...]]] = {
    "short": (texts.short, (32, 1)),
    "mix": (texts.mixed, (32, 8)),
}  # part of the benchmark -> (function that makes its texts, numbers of connections with which it is measured)

app = command_app()


class BenchPart(StrEnum):
    short = "short"
    mix = "mix"
    bulk = "bulk"
    memory = "memory"
    start = "start"
    overhead = "overhead"


DEFAULT_PARTS = [part for part in BenchPart if part != BenchPart.overhead]  # the part `overhead` measures other models


@app.command()
def bench(
    bundle: Annotated[Path, typer.Option(help="Bundle of an encoder, fp32 or int8.")] = Path("bundles/all-MiniLM-L6-v2"),
    beside: Annotated[list[Path] | None, typer.Option(help="Another bundle to serve, for start and memory. Can be repeated.")] = None,
    rounds: runner.Rounds = 3,
    seconds: runner.WholeSeconds = 10,
    quick: Annotated[bool, typer.Option("--quick", help="One round of one second: shows that it works, proves nothing.")] = False,
    only: Annotated[str, typer.Option(help="Parts to measure, with commas.")] = ",".join(DEFAULT_PARTS),
    peer_env: Annotated[Path, typer.Option(help="Where `python -m loadtest.bench.peers install infinity` put infinity.")] = peers.INFINITY,
    out: runner.Out = Path("out/bench"),
    markdown: runner.Markdown = False,
) -> None:
    """Compare the service with the bare runtime and with infinity-emb.

    Starts and stops everything itself. Exits with 1 if a required ratio is missed, except with --quick. Keep the machine idle otherwise.
    """
    parts = chosen(only, BenchPart)
    manifest = runner.manifest_of(bundle, "encoder")
    if parts & {*LOADS, BenchPart.overhead}:
        wrk.binary()
    measured, missing = Measurements(), peers.missing(peer_env)
    rounds, seconds = (1, 1.0) if quick else (rounds, seconds)
    peer = None if missing else peer_env
    work = Work(bundle, manifest.name, manifest.limits.max_tokens, seconds, parts, peer, measured, beside=beside or ())
    if missing and work.loads:
        measured.absent[PEER] = missing
    plan = {"seconds": seconds, "parts": sorted(parts), "seed": work.seed}
    contestants = work.contestants() if parts - {BenchPart.overhead} else []
    if BenchPart.overhead in parts:
        contestants += Overhead(bundle, out / "models", seconds, measured).contestants()
    about = runner.run(contestants, rounds, measured, [bundle], plan)
    about["peer"] = {"name": "infinity-emb, optimum engine", "versions": peers.versions(work.peer)} if work.peer else None
    subject = f"{manifest.name}, {manifest.precision}"
    overheads = overhead.rows(measured) if BenchPart.overhead in parts else []
    runner.finish([*rows(parts, measured), *overheads], measured, about, subject=subject, out=out, markdown=markdown, judged=not quick)


class Work:
    """The contestants of `attnserve bench`, and the measurements that are made of each of them in a round."""

    def __init__(
        self,
        bundle: Path,
        model: str,
        max_tokens: int,
        seconds: float,
        parts: frozenset[BenchPart],
        peer: Path | None,
        measured: Measurements,
        *,
        beside: Sequence[Path] = (),
    ) -> None:
        self.bundle, self.model, self.max_tokens, self.seconds, self.parts, self.peer = bundle, model, max_tokens, seconds, parts, peer
        self.loads, self.seed = parts & {BenchPart.short, BenchPart.mix, BenchPart.bulk}, "attnserve"
        self._measured = measured
        self._flags = [word for other in beside for word in ("--bundle", str(other))]
        self._bare_per_s: dict[str, float] = {}
        self._bare_costs: dict[int, float] = {}  # length of a text in tokens -> seconds that the bare runtime needs for it, without padding
        self._vectors: list[list[float]] = []

    def contestants(self) -> list[Contestant]:
        made = [Contestant(SERVICE, self._steps(SERVICE), self._service)]
        if self.peer and self.loads:
            made.append(Contestant(PEER, self._steps(PEER), self._infinity, optional=True))
        if BenchPart.memory in self.parts:
            made.append(Contestant(LEAN, [Measurement("memory", partial(self._memory, LEAN))], self._lean, once=True))
        return made

    def _steps(self, contestant: str) -> list[Measurement]:
        """Return the measurements of a contestant's turn. For infinity, these are the runs of wrk and the bulk request (many
        texts in one request). The service's turn also includes the bare runtime and the memory."""
        ours, steps = contestant == SERVICE, list[Measurement]()
        for part, (prepare, connections) in LOADS.items():
            if part in self.parts:
                steps += [
                    Measurement(f"bare runtime, {part}", self._bare_mix if part == BenchPart.mix else partial(self._bare, part))
                ] * ours
                steps += [Measurement(load_name(part, count), partial(self._load, part, prepare, count)) for count in connections]
        if BenchPart.bulk in self.parts:
            steps += [Measurement("bare runtime, bulk", partial(self._bare, "bulk"))] * ours
            steps += [Measurement(f"one request of {BULK_TEXTS:,} texts", self._bulk)]
        return [*steps, *[Measurement("memory", partial(self._memory, SERVICE))] * (ours and BenchPart.memory in self.parts)]

    # How contestants start ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _service(self) -> Iterator[MeasuredServer]:
        with attnserve(self.bundle, self.model, flags=self._flags) as server:
            self._measured.note("start", SERVICE, seconds=server.start_s)
            if self.loads:
                self._warm(server)
            yield server
            if self.loads and self.peer:
                self._vectors = server.embed(texts.mixed(8, "the same model?"))

    @contextmanager
    def _infinity(self) -> Iterator[MeasuredServer]:
        """Start infinity. Raises LoadtestError if its embeddings differ from the bundle's."""
        assert self.peer is not None
        with peers.infinity(self.peer) as server:
            cosine = min(map(_cosine, self._vectors, server.embed(texts.mixed(8, "the same model?"))))
            self._measured.note("the same model?", PEER, lowest_cosine=cosine)
            if cosine < SAME_MODEL:
                raise LoadtestError(
                    f"infinity serves another model than the bundle: lowest cosine {cosine:.4f}. Install it with --checkpoint"
                )
            self._warm(server)
            yield server

    @contextmanager
    def _lean(self) -> Iterator[MeasuredServer]:
        with attnserve(self.bundle, self.model, lean=True, flags=self._flags) as server:
            self._measured.note("start", LEAN, seconds=server.start_s)
            yield server

    def _warm(self, server: MeasuredServer) -> None:
        """Warm up a contestant before it is measured. Every contestant gets the same texts."""
        server.post(texts.mixed(64, self._seed("warm")))

    def _seed(self, work: str) -> str:
        return f"{self.seed} {self._measured.round} {work}"

    # Measurements ------------------------------------------------------------------------------------------------------------------------

    def _run_bare(self, shapes: list[bare.Batch], seconds: float, *, spin: bool, callers: int = 1) -> dict[bare.Batch, bare.Timing]:
        return bare.measure(self.bundle, shapes, threads=machine.cpus(), seconds=seconds, spin=spin, callers=callers)

    def _bare(self, part: str, _: MeasuredServer) -> None:
        """Measure the bare runtime's texts/s in batches of SHORT_BATCH, and its latency for one text. This is done three times: with
        threads that sleep while they wait, with threads that spin, and with as many callers as there are CPUs."""
        n = round(statistics.median(bare.token_counts(self.bundle, texts.short(50, "length"))))
        batch, one = (SHORT_BATCH, n), (1, n)
        self._bare_per_s[part] = 0.0
        for contestant, spin, callers in ((BARE, False, 1), (BARE, True, 1), (f"{BARE}, a caller for each thread", False, machine.cpus())):
            timings = self._run_bare([batch, one], self.seconds / 4, spin=spin, callers=callers)
            self._measured.note(part, contestant, spin=spin, batch=timings[batch], one=timings[one], tokens=n)
            if contestant == BARE:
                self._bare_per_s[part] = max(self._bare_per_s[part], timings[batch]["texts_per_s"])

    def _bare_mix(self, _: MeasuredServer) -> None:
        """Measure the bare runtime's seconds for one text at each length, with threads that sleep while they wait and with threads that
        spin. The smaller value counts."""
        self._bare_costs = {}
        shapes = bare.shapes_for_mix(self.max_tokens)
        for spin in (False, True):
            timings = self._run_bare(shapes, max(self.seconds / 20, 0.1), spin=spin)
            found = bare.cost_s({shape: timing["texts_per_s"] for shape, timing in timings.items()})
            batches = {f"{b}x{n}": timing for (b, n), timing in timings.items()}
            self._measured.note("mix", BARE, spin=spin, cost_s=found, batches=batches)
            self._bare_costs = {n: min(cost, self._bare_costs.get(n, cost)) for n, cost in found.items()}
        lengths = bare.token_counts(self.bundle, texts.mixed(len(texts.MIX), "lengths"))
        self._bare_per_s["mix"] = bare.allowed_per_s(lengths, self._bare_costs)

    def _load(self, part: str, prepare: Callable[[int, str], list[str]], connections: int, server: MeasuredServer) -> None:
        """Run wrk once and note its figures. For the service and texts of mixed lengths, also compute the texts/s that the bare runtime
        could reach with the same texts."""
        work = load_name(part, connections)
        prepared = prepare(int(3 * self._bare_per_s[part] * self.seconds) + 4 * connections + 100, self._seed(work))
        before = server.shortcuts()
        load = wrk.run(server.url, [server.body(text) for text in prepared], connections=connections, seconds=self.seconds)
        time.sleep(1)  # wait until the service has finished the requests that wrk left open
        problems = load.problems + _shortcut_problems(server, before)
        raw: dict[str, Any] = {"per_s": load.per_s, "per_s_at_most": load.per_s_at_most, "problems": problems, "wrk": load.__dict__}
        if part == BenchPart.mix and server.name == SERVICE:
            tokens = bare.token_counts(self.bundle, prepared[: max(load.requests, 1)])
            raw |= {"allowed_per_s": bare.allowed_per_s(tokens, self._bare_costs), "tokens_on_average": statistics.mean(tokens)}
        self._measured.note(work, server.name, **raw)

    def _bulk(self, server: MeasuredServer) -> None:
        before = server.shortcuts()
        elapsed, answer = server.post(texts.short(BULK_TEXTS, self._seed("bulk")))
        problems = _shortcut_problems(server, before)
        figures = {"seconds": elapsed, "per_s": BULK_TEXTS / elapsed, "answer_bytes": len(answer)}
        self._measured.note("bulk", server.name, **figures, problems=problems)

    def _memory(self, contestant: str, server: MeasuredServer) -> None:
        """Measure the memory (PSS) and the CPU time of a contestant that has no requests. This comes after its other measurements, so that
        memory which it has not freed is included."""
        server.post(texts.mixed(BULK_TEXTS // 8, self._seed("memory")))
        time.sleep(2)
        tree = memory.tree(server.pid)
        before, started = memory.cpu_s(tree), time.perf_counter()
        time.sleep(3)
        cores = (memory.cpu_s(tree) - before) / (time.perf_counter() - started)
        processes = memory.measure(server.pid)
        total = sum(process.pss_bytes for process in processes)
        about = ", ".join(f"{process.name} {process.pss_bytes / MiB:.0f}" for process in processes)
        self._measured.note("memory", contestant, pss_bytes=total, processes=[process.__dict__ for process in processes], note=about)
        self._measured.note("idle", contestant, cores=cores)


def load_name(part: str, connections: int) -> str:
    return f"{part}, {connections} connection{'s' * (connections > 1)}"


def _shortcut_problems(server: MeasuredServer, before: float | None) -> list[str]:
    """Return the problems of a measurement of the service: it answered some texts without computing them, or it does not count such texts.
    `before` is their number at the beginning of the measurement."""
    if server.name != SERVICE:
        return []
    after = server.shortcuts()
    if before is None or after is None:
        return ["/metrics does not count cache hits and joined inputs"]
    return [f"{after - before:.0f} texts came from the cache or joined others"] if after != before else []


def _cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


# Rows ------------------------------------------------------------------------------------------------------------------------------------


def rows(parts: frozenset[BenchPart], measured: Measurements) -> list[ReportRow]:
    """Return the report's rows for these parts: one for each required value, and rows for comparison that have no required value."""
    tokens = next((entry["tokens"] for entry in measured.of("short", BARE)), "?")
    short = f"one {texts.SHORT_WORDS}-word text ({tokens} tokens) a request"
    mix, bulk = "one text of 6 to 220 words, mostly short", f"one request of {BULK_TEXTS:,} short texts"
    batches, batch, p50 = f"bare onnxruntime, batches of {SHORT_BATCH}", "batch.texts_per_s", "wrk.p50_ms"
    many, one, mix_many, mix_few = (load_name(part, count) for part, (_, counts) in LOADS.items() for count in counts)
    made: list[ReportRow] = []

    def add(part: BenchPart, work: str, unit: str, figure: Figure, reference: Figure | None = None, bar: Bar | None = None) -> None:
        made.extend([runner.compare(measured, work, unit, figure, reference, bar)] * (part in parts))

    bare_bar, best = Bar(at_least=0.85, reference=batches), Figure("short", BARE, batch, best=max)
    add(BenchPart.short, f"{short}, 32 connections", "texts/s", Figure(many, SERVICE), best, bare_bar)
    add(BenchPart.short, "the same, infinity", "texts/s", Figure(many, PEER))
    add(BenchPart.short, f"{batches}, a caller for each thread", "texts/s", Figure("short", f"{BARE}, a caller for each thread", batch))
    call = Figure("short", BARE, "one.p50_ms", best=min)
    add(BenchPart.short, f"{short}, 1 connection, p50", "ms", Figure(one, SERVICE, p50), call, Bar(at_most_more=2, reference="bare call"))
    add(BenchPart.short, "the same, infinity", "ms", Figure(one, PEER, p50))
    allowed = Bar(at_least=0.85, reference="what bare onnxruntime allows")
    add(BenchPart.mix, f"{mix}, 32 connections", "texts/s", Figure(mix_many, SERVICE), Figure(mix_many, SERVICE, "allowed_per_s"), allowed)
    for load, ratio in ((mix_many, 2.0), (mix_few, 1.4)):
        # infinity's rate is rounded up: half of its requests that were in flight when the load ended count as answered.
        peer = Figure(load, PEER, "per_s_at_most")
        bar = Bar(at_least=ratio, reference="infinity-emb, optimum engine")
        add(BenchPart.mix, f"{mix}, {load.partition(', ')[2]}", "texts/s", Figure(load, SERVICE), peer, bar)
    bulk_bare = Figure("bulk", BARE, batch, best=max)
    add(BenchPart.bulk, bulk, "texts/s", Figure("bulk", SERVICE), bulk_bare, Bar(at_least=0.9, reference=batches))
    add(BenchPart.bulk, "the same, infinity", "texts/s", Figure("bulk", PEER))
    for contestant in (SERVICE, LEAN):
        haproxy = ", HAProxy on" * (contestant == SERVICE)
        work = f"memory of {contestant} with one model{haproxy}, all processes, PSS"
        add(BenchPart.memory, work, "MiB", Figure("memory", contestant, "pss_bytes", 1 / MiB))
        add(BenchPart.memory, f"processor time of {contestant} while idle", "% of a core", Figure("idle", contestant, "cores", 100))
    add(BenchPart.start, "`attnserve serve` of an existing bundle to ready", "s", Figure("start", SERVICE, "seconds"), bar=Bar(at_most=15))
    return made
