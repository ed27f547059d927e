"""`attnserve bench-states`: measures the cost of storing a state, and the time saved by restoring it instead of feeding the prompt again.

A round measures, in this order: the service over HTTP, the engine without HTTP, the cost of checkpoints (states stored during a run),
prompts whose states another engine has stored, and each store alone. After an interruption, the same command continues with the turn that
was interrupted.
"""

import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from export import contract
from loadtest.bench import runner, states_over_http
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common.report import Bar, ReportRow
from loadtest.common.server import MeasuredServer, attnserve
from loadtest.common.terminal import chosen
from loadtest.in_process import checkpoints, prefixes, states, stores
from service.deployment.ports import free_port
from service.terminal import command_app

app = command_app()

CONTEXTS = (100, 10_000, 100_000)
MANY = 10_000
PARTS = ("p50", "p99")
PREFIXES = (1_024, 4_096, 10_000)  # lengths in tokens of the prompts whose states another engine has stored
HTTP, ENGINE, CHECKPOINTS, TURN, EACH, EVEN = "HTTP", "engine", "checkpoints", "turn", "many", "even"
SECONDS = 2.0  # length of each measured period, with or without checkpoints
OLD_CACHE = "KV cache of a softmax twin"


class Part(StrEnum):
    http = "http"
    engine = "engine"
    checkpoints = "checkpoints"
    prefixes = "prefixes"
    stores = "stores"


@app.command()
def bench_states(
    bundle: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    rounds: runner.Rounds = 3,
    only: Annotated[str, typer.Option(help="Comma-separated parts.")] = ",".join(Part),
    many: Annotated[int, typer.Option(min=100, help="States that are stored, listed, forked and expired.")] = MANY,
    out: runner.Out = Path("out/bench-states"),
    markdown: runner.Markdown = False,
) -> None:
    """Measure restoring, forking and storing states. Exits with 1 if a required value is missed. Keep the machine idle otherwise."""
    parts = chosen(only, Part)
    manifest, measured = runner.manifest_of(bundle, "decoder"), Measurements()
    assert manifest.decoder is not None
    size = sum(math.prod(state.shape) * np.dtype(state.dtype).itemsize for state in manifest.decoder.states)
    blob = np.random.default_rng(0).bytes(size + 4 * manifest.limits.vocab_size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-states-")))
        places = {"SQLite": str(folder / "stored")}
        if shutil.which("redis-server"):
            places["Redis"] = stack.enter_context(_redis(folder))
        else:
            measured.absent["Redis"] = "redis-server is not installed"
        served = partial(attnserve, bundle, manifest.name, flags=(*states_over_http.FLAGS, "--set", f"states={folder / 'served'}"))
        made = {
            Part.http: Contestant(HTTP, [Measurement("contexts", partial(_over_http, measured, manifest.limits.vocab_size))], served),
            Part.engine: Contestant(ENGINE, [Measurement("contexts", partial(_contexts, bundle, folder, measured))]),
            Part.checkpoints: Contestant(CHECKPOINTS, [Measurement("price", partial(_checkpoints, bundle, folder, measured))]),
            Part.prefixes: Contestant("prefixes", [Measurement("from the store", partial(_prefixes, bundle, folder, measured))]),
        }
        contestants = [contestant for part, contestant in made.items() if part in parts]
        for name, location in places.items() if Part.stores in parts else ():
            steps = [
                Measurement("turns", partial(_turns, name, location, blob, measured)),
                Measurement("KV caches", partial(_caches, name, location, manifest, measured)),
                Measurement(f"{many:,} states", partial(_many, name, location, many, blob, measured)),
            ]
            contestants.append(Contestant(name, steps))
        plan = {"seconds": SECONDS, "contexts": list(CONTEXTS), "many": many, "parts": sorted(parts)}
        about = runner.run(contestants, rounds, measured, [bundle], plan, kept=out / "unfinished.json")
    rows = {
        Part.http: _rows_over_http(measured),
        Part.engine: _rows_of_contexts(measured),
        Part.checkpoints: _rows_of_checkpoints(measured),
        Part.prefixes: _rows_of_prefixes(measured),
        Part.stores: _rows_of_stores(measured, list(places), manifest, len(blob), many),
    }
    runner.finish(
        [row for part in Part if part in parts for row in rows[part]], measured, about, subject="states", out=out, markdown=markdown
    )


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """Start a Redis server that writes its append-only file to disk each second, and yield its URL."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def cache_bytes(manifest: contract.Manifest, tokens: int) -> int:
    """Return the size in bytes of an fp32 KV cache for `tokens` tokens, in a softmax decoder with the same heads as the bundle's
    decoder."""
    assert manifest.decoder is not None
    heads = [state.shape for state in manifest.decoder.states if len(state.shape) == 3]  # (H, D_k, D_v) for each layer
    return tokens * sum(4 * H * (D_k + D_v) for H, D_k, D_v in heads)


# Measuring -------------------------------------------------------------------------------------------------------------------------------


def _over_http(measured: Measurements, vocab_size: int, server: MeasuredServer) -> None:
    found = states_over_http.measure(server, CONTEXTS, states.LONG, vocab_size, measured.round)
    for context in CONTEXTS:
        measured.note(f"{context:,}", HTTP, restored=found.restored[context], forked=found.forked[context])
    measured.note("alone", HTTP, one=found.one, again=found.again, step=found.step)
    measured.note(EVEN, HTTP, restored=_unevenness(found.restored.values()), forked=_unevenness(found.forked.values()))


def _contexts(bundle: Path, folder: Path, measured: Measurements, _: object) -> None:
    found = states.in_engine(bundle, folder / "contexts", CONTEXTS, measured.round)
    for context, each in found.restored.items():
        measured.note(f"{context:,}", ENGINE, **asdict(each), allowed=2 * found.step + each.read)
    measured.note("alone", ENGINE, again=found.again, step=found.step)
    restored, forked = ([getattr(each, what) for each in found.restored.values()] for what in ("first_token", "from_fork"))
    measured.note(EVEN, ENGINE, restored=_unevenness(restored), forked=_unevenness(forked))


def _checkpoints(bundle: Path, folder: Path, measured: Measurements, _: object) -> None:
    found = checkpoints.price(bundle, folder / f"checkpoints-{measured.round}", SECONDS)
    for on, off in zip(found.with_checkpoints, found.without, strict=True):
        measured.note(CHECKPOINTS, ENGINE, on=asdict(on), off=asdict(off), per_s=found.per_s)


def _prefixes(bundle: Path, folder: Path, measured: Measurements, _: object) -> None:
    for size, each in prefixes.from_store(bundle, folder / f"prefixes-{measured.round}", PREFIXES, measured.round).items():
        measured.note(f"prompt of {size:,}", ENGINE, read=each.read, fed=each.fed)


def _turns(name: str, location: str, blob: bytes, measured: Measurements, _: object) -> None:
    measured.note(TURN, name, **stores.turns(location, blob))


def _caches(name: str, location: str, manifest: contract.Manifest, measured: Measurements, _: object) -> None:
    for context in CONTEXTS:
        if (found := stores.caches(location, cache_bytes(manifest, context))) is not None:
            measured.note(f"{OLD_CACHE}, {context:,}", name, **found)


def _many(name: str, location: str, many: int, blob: bytes, measured: Measurements, _: object) -> None:
    found = stores.many_states(location, many, blob)
    measured.note(EACH, name, took=found.took, memory=found.memory, blobs=found.blobs)


def _unevenness(each: Iterable[float]) -> float:
    values = list(each)
    return max(values) / min(values)


# Rows ------------------------------------------------------------------------------------------------------------------------------------


def _rows_over_http(measured: Measurements) -> list[ReportRow]:
    rows = []
    for context in CONTEXTS:
        restored, forked = (Figure(f"{context:,}", HTTP, part) for part in ("restored", "forked"))
        one = Figure("alone", HTTP, "one")
        rows += [
            runner.compare(measured, f"HTTP, context of {context:,} tokens: restored, then the first token", "ms", restored, one),
            runner.compare(measured, "the same, from a fork", "ms", forked, one),
        ]
    again, restored = Figure("alone", HTTP, "again"), Figure(f"{CONTEXTS[1]:,}", HTTP, "restored")
    return [
        *rows,
        *_rows_even(measured, HTTP),
        runner.compare(measured, "HTTP: a prompt of one token, to the first token", "ms", Figure("alone", HTTP, "one")),
        runner.compare(measured, "HTTP: one more token of a text", "ms", Figure("alone", HTTP, "step")),
        runner.compare(measured, f"HTTP: a prompt of {states.LONG:,} tokens, fed again", "ms", again, restored),
    ]


def _rows_even(measured: Measurements, contestant: str) -> list[ReportRow]:
    bar = Bar(at_most=1.1)
    return [
        runner.compare(
            measured, f"{contestant}: slowest context beside the fastest, {what}", "x", Figure(EVEN, contestant, what), None, bar
        )
        for what in ("restored", "forked")
    ]


def _rows_of_contexts(measured: Measurements) -> list[ReportRow]:
    rows = []
    bar = Bar(at_most_more=0, reference="2 decode steps and the store's read")
    for context in CONTEXTS:
        work = f"{context:,}"
        allowed = Figure(work, ENGINE, "allowed")
        for what, part in (("restored, then the first token", "first_token"), ("forked, then the first token of the fork", "from_fork")):
            told = f"engine, context of {work} tokens: {what}"
            rows.append(runner.compare(measured, told, "ms", Figure(work, ENGINE, part), allowed, bar))
        for what, part in (("restored, then one new token fed", "after_one"), ("making the fork", "fork"), ("the store's read", "read")):
            rows.append(runner.compare(measured, f"context of {work} tokens: {what}", "ms", Figure(work, ENGINE, part)))
    again, restored = Figure("alone", ENGINE, "again"), Figure(f"{CONTEXTS[1]:,}", ENGINE, "first_token")
    sooner = Bar(at_least=100, reference="restoring it")
    return [
        *rows,
        *_rows_even(measured, ENGINE),
        runner.compare(measured, "engine: a decode step, one run", "ms", Figure("alone", ENGINE, "step")),
        runner.compare(measured, f"engine: a prompt of {states.LONG:,} tokens, fed again", "ms", again, restored, sooner),
    ]


def _rows_of_checkpoints(measured: Measurements) -> list[ReportRow]:
    work = f"{checkpoints.ROWS} runs, with a checkpoint every {checkpoints.EVERY:,} tokens"
    on, off = Figure(CHECKPOINTS, ENGINE, "on.per_s"), Figure(CHECKPOINTS, ENGINE, "off.per_s")
    used, without = Figure(CHECKPOINTS, ENGINE, "on.cpu_us"), Figure(CHECKPOINTS, ENGINE, "off.cpu_us")
    return [
        runner.compare(measured, work, "tokens/s", on, off, Bar(at_least=0.97, reference="without checkpoints")),
        runner.compare(measured, "the same, CPU time of a token beside one without", "us", used, without),
        runner.compare(measured, "checkpoints of these runs", "/s", Figure(CHECKPOINTS, ENGINE, "per_s")),
    ]


def _rows_of_prefixes(measured: Measurements) -> list[ReportRow]:
    rows = []
    for size in PREFIXES:
        read, fed = (Figure(f"prompt of {size:,}", ENGINE, part) for part in ("read", "fed"))
        rows.append(runner.compare(measured, f"engine: a prompt of {size:,} tokens that another process has read", "ms", read, fed))
    return rows


def _rows_of_stores(measured: Measurements, names: list[str], manifest: contract.Manifest, size: int, many: int) -> list[ReportRow]:
    rows: list[ReportRow] = []
    for name in names:
        kept = [(TURN, f"a turn of {size:,} bytes")]
        for context in CONTEXTS:
            work, bytes_ = f"{OLD_CACHE}, {context:,}", cache_bytes(manifest, context)
            if measured.of(work, name):
                kept.append((work, f"the {OLD_CACHE} of {context:,} tokens, {bytes_:,} bytes"))
        for work, told in kept:
            for what in ("write", "read"):
                for part in PARTS if work == TURN else PARTS[:1]:
                    figure = Figure(work, name, f"{what}.{part}")
                    rows.append(runner.compare(measured, f"{name}: {what} of {told}, {part}", "ms", figure))
        found = measured.of(EACH, name)
        for kind in found[0]["took"] if found else ():
            for part in ("most",) if "all" in kind else ("p50", "most"):  # a kind with "all" in its name is a single call
                told = f"{name}, {many:,} states: {kind}, {part}"
                rows.append(runner.compare(measured, told, "ms", Figure(EACH, name, f"took.{kind}.{part}")))
        rows += [
            runner.compare(measured, f"{name}: memory for them in this process", "MiB", Figure(EACH, name, "memory")),
            runner.compare(
                measured, f"{name}: blobs of a parent with {many:,} forks", "", Figure(EACH, name, "blobs"), None, Bar(at_most=1)
            ),
        ]
    return rows
