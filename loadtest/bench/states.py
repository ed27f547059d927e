"""`attnserve bench-states`: measures what a stored state costs, and what it saves compared with a prompt that is fed again.

The engine and its store run in this process, without HTTP. The prefix cache and the memory of states
that were used last are off: every state is read from the store.
"""

import asyncio
import math
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from loadtest.bench import runner
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common.report import Bar, ReportRow
from loadtest.errors import LoadtestError
from service.catalog import Catalog
from service.deployment.ports import free_port
from service.generation.request import GenerationRequest, Sampling
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.opening import open_engine
from service.states.record import Filter, Keep, Quota, StateRecord, StateReference, new_state_id
from service.terminal import command_app

app = command_app()

CONTEXTS = (100, 10_000, 100_000)
LONG = 10_000  # tokens of the prompt that is fed again
REPEATS = 30
WRITES = 200
MANY = 10_000
_LIFE_S = 0.5  # of the states that expire
PARTS = ("p50", "p99")
ROOM = Quota(states=2 * MANY + 1000, size=2**40)
RESTORED, AGAIN, STEP, READ = "restored", "fed again", "a decode step", "the store's read"


@app.command()
def bench_states(
    bundle: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    rounds: runner.Rounds = 3,
    many: Annotated[int, typer.Option(min=100, help="States that are stored, listed, forked and expired.")] = MANY,
    out: runner.Out = Path("out/bench-states"),
    markdown: runner.Markdown = False,
) -> None:
    """Measure restoring, forking and storing states. Exits with 1 if a required value is missed. Keep the machine idle otherwise."""
    manifest, measured = runner.manifest_of(bundle, "decoder"), Measurements()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-states-")))
        stores = {"SQLite": str(folder / "stored")}
        if shutil.which("redis-server"):
            stores["Redis"] = stack.enter_context(_redis(folder))
        else:
            measured.absent["Redis"] = "redis-server is not installed"
        contestants = [Contestant("engine", [Measurement("contexts", lambda _: asyncio.run(_contexts(bundle, folder, measured)))])]
        assert manifest.decoder is not None
        size = sum(math.prod(state.shape) * np.dtype(state.dtype).itemsize for state in manifest.decoder.states)
        blob = np.random.default_rng(0).bytes(size + 4 * manifest.limits.vocab_size)
        for name, location in stores.items():
            steps = [Measurement("turns", partial(_turns, name, location, blob, measured))]
            contestants.append(Contestant(name, steps))
            contestants.append(
                Contestant(f"{name}, {many:,} states", [Measurement("many", partial(_many, name, location, many, measured))])
            )
        about = runner.run(contestants, rounds, measured, [bundle], {"seconds": 0, "contexts": CONTEXTS, "many": many})
    rows = [*_rows_of_contexts(measured), *_rows_of_stores(measured, stores, len(blob), many)]
    runner.finish(rows, measured, about, subject="states", out=out, markdown=markdown)


# States in the engine --------------------------------------------------------------------------------------------------------------------


async def _contexts(bundle: Path, folder: Path, measured: Measurements) -> None:
    """Note, in milliseconds: the first token after a state of each context, a decode step, the store's read, and a prompt fed again."""
    given = {"bundles": [str(bundle)], "states": str(folder / "contexts"), "prefix_cache_bytes": 0, "hot_state_bytes": 0}
    catalog = Catalog(Settings.model_validate(given))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    try:
        await _measure_contexts(catalog, measured)
    finally:
        await catalog.stop()


async def _measure_contexts(catalog: Catalog, measured: Measurements) -> None:
    model = catalog.generator(None)
    assert catalog.states is not None
    vocab_size = model.manifest.limits.vocab_size
    seeded = np.random.default_rng(measured.round)

    def asked(tokens: int, **options: Any) -> GenerationRequest:
        prompt = tuple(seeded.integers(0, vocab_size, tokens).tolist())
        return GenerationRequest(**{"prompt": prompt, "sampling": Sampling(seed=0), "max_tokens": 1, "ignore_eos": True, **options})

    async def first_token_s(request: GenerationRequest) -> float:
        started = time.perf_counter()
        (run,) = await model.engine.open([request], "")
        async for _ in run:
            return time.perf_counter() - started
        raise LoadtestError("a run has ended without a token")

    for context in CONTEXTS:
        record = _record(model.name, model.manifest.fingerprint)
        (run,) = await model.engine.open([asked(context, max_tokens=0, keep=Keep(record=record, quota=ROOM))], "")
        async for _ in run:
            pass
        start = StateReference("", record.id)
        took_s = [await first_token_s(asked(0, start=start)) for _ in range(REPEATS)]
        after_s = [await first_token_s(asked(1, start=start)) for _ in range(REPEATS)]
        read_s = [await _timed(catalog.states.call(partial(_read, state=record.id))) for _ in range(REPEATS)]
        work = f"context of {context:,} tokens"
        measured.note(work, RESTORED, ms=_median_ms(took_s), next_ms=_median_ms(after_s))
        measured.note(work, READ, ms=_median_ms(read_s))
    measured.note("again", AGAIN, ms=_median_ms([await first_token_s(asked(LONG)) for _ in range(3)]))
    (run,) = await model.engine.open([asked(8, max_tokens=2_000)], "")
    started = time.perf_counter()
    tokens = sum([len(delta.token_ids) async for delta in run])
    measured.note("step", STEP, ms=1000 * (time.perf_counter() - started) / tokens)


def _read(engine: StateEngine, state: str) -> bytes:
    return engine.blob("", state)


async def _timed(awaited: Awaitable[object]) -> float:
    started = time.perf_counter()
    await awaited
    return time.perf_counter() - started


def _record(model: str, fingerprint: str) -> StateRecord:
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


def _rows_of_contexts(measured: Measurements) -> list[ReportRow]:
    works = [f"context of {context:,} tokens" for context in CONTEXTS]
    step, again = Figure("step", STEP, "ms"), Figure("again", AGAIN, "ms")
    shortest = Figure(works[0], RESTORED, "ms")
    rows: list[ReportRow] = []
    for work in works:
        restored, read = Figure(work, RESTORED, "ms"), Figure(work, READ, "ms")
        rows += [
            runner.compare(measured, f"{work}: restored, then the first token", "ms", restored, shortest),
            runner.compare(measured, "the same, after one new token", "ms", Figure(work, RESTORED, "next_ms")),
            runner.compare(measured, "the store's read of that state", "ms", read),
        ]
    rows.append(runner.compare(measured, "a decode step, one run", "ms", step))
    bar = Bar(at_least=100, reference="restoring it")
    rows.append(runner.compare(measured, f"a prompt of {LONG:,} tokens, fed again", "ms", again, Figure(works[1], RESTORED, "ms"), bar))
    return rows


# Stores ----------------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """Start a Redis server that syncs its log each second, and yield its URL."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


@contextmanager
def _opened(location: str) -> Iterator[StateEngine]:
    engine = open_engine(location)
    try:
        yield engine
    finally:
        engine.close()


def _turns(name: str, location: str, blob: bytes, measured: Measurements, _: object) -> None:
    """Note how long a stored turn takes, one at a time: its write, and its read."""
    with _opened(location) as engine:
        records = [_record("bench", "f") for _ in range(WRITES)]
        blobs = [blob[:-8] + number.to_bytes(8, "little") for number in range(WRITES)]
        writes = [_took(partial(engine.put, record, each, quota=ROOM)) for record, each in zip(records, blobs, strict=True)]
        reads = [_took(partial(engine.blob, "", record.id)) for record in records]
        for record in records:
            engine.delete("", record.id)
    for what, took in (("write", writes), ("read", reads)):
        cuts = statistics.quantiles(took, n=100)
        measured.note(what, name, p50=1000 * cuts[49], p99=1000 * cuts[98])


def _many(name: str, location: str, many: int, measured: Measurements, _: object) -> None:
    """Note how long each of many states takes: stored and expired, forked from one parent, listed. Memory is that of this process."""
    process = psutil.Process()
    with _opened(location) as engine:
        before = process.memory_info().rss
        parent = engine.put(_record("bench", "f"), b"the only blob", quota=ROOM)

        def store() -> None:
            record = replace(_record("bench", "f"), expires=time.time() + _LIFE_S)
            engine.put(record, record.id.encode(), quota=ROOM)

        def fork() -> None:
            engine.put(replace(_record("bench", "f"), parent=parent.id, origin="fork"), None, quota=ROOM)

        stored = [_took(store) for _ in range(many)]
        time.sleep(_LIFE_S)
        took = {
            "stored": stored,
            "expired": [_took(engine.sweep) / many],
            "forked from one parent": [_took(fork) for _ in range(many)],
            "listed, a page of 100": [_took(partial(engine.page, "", Filter(limit=100))) for _ in range(100)],
        }
        memory = process.memory_info().rss - before
        forks = engine.children("", parent.id, many)
        took["deleted"] = [_took(partial(engine.delete, "", fork.id)) for fork in (*forks, parent)]
    for what, seconds in took.items():
        measured.note(f"many {what}", name, p50=_median_ms(seconds))
    measured.note("many memory", name, mib=memory / 2**20)


def _took(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def _rows_of_stores(measured: Measurements, stores: dict[str, str], size: int, many: int) -> list[ReportRow]:
    rows: list[ReportRow] = []
    kinds = ("stored", "expired", "forked from one parent", "listed, a page of 100", "deleted")
    for name in stores:
        turns = [(f"{what} of a turn of {size:,} bytes, {part}", Figure(what, name, part)) for what in ("write", "read") for part in PARTS]
        each = [(f"one of {many:,} {what}, p50", Figure(f"many {what}", name, "p50")) for what in kinds]
        rows += [runner.compare(measured, f"{name}: {work}", "ms", figure) for work, figure in (*turns, *each)]
        rows.append(runner.compare(measured, f"{name}: memory for them in this process", "MiB", Figure("many memory", name, "mib")))
    return rows
