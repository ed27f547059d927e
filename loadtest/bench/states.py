"""`attnserve bench-states`: measures what a stored state costs, and what it saves compared with a prompt that is fed again."""

import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from loadtest.bench import runner
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common.report import Bar, ReportRow
from loadtest.in_process import states
from service.deployment.ports import free_port
from service.terminal import command_app

app = command_app()

CONTEXTS = (100, 10_000, 100_000)
MANY = 10_000
PARTS = ("p50", "p99")
KINDS = ("stored", "expired", "forked from one parent", "listed, a page of 100", "deleted")
ENGINE, TURN, EACH = "engine", "turn", "many"


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
    assert manifest.decoder is not None
    size = sum(math.prod(state.shape) * np.dtype(state.dtype).itemsize for state in manifest.decoder.states)
    blob = np.random.default_rng(0).bytes(size + 4 * manifest.limits.vocab_size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-states-")))
        stores = {"SQLite": str(folder / "stored")}
        if shutil.which("redis-server"):
            stores["Redis"] = stack.enter_context(_redis(folder))
        else:
            measured.absent["Redis"] = "redis-server is not installed"
        contestants = [Contestant(ENGINE, [Measurement("contexts", partial(_contexts, bundle, folder, measured))])]
        for name, location in stores.items():
            steps = [
                Measurement("turns", partial(_turns, name, location, blob, measured)),
                Measurement(f"{many:,} states", partial(_many, name, location, many, measured)),
            ]
            contestants.append(Contestant(name, steps))
        about = runner.run(contestants, rounds, measured, [bundle], {"seconds": 0, "contexts": CONTEXTS, "many": many})
    rows = [*_rows_of_contexts(measured), *_rows_of_stores(measured, list(stores), len(blob), many)]
    runner.finish(rows, measured, about, subject="states", out=out, markdown=markdown)


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


def _contexts(bundle: Path, folder: Path, measured: Measurements, _: object) -> None:
    found = states.in_engine(bundle, folder / "contexts", CONTEXTS, measured.round)
    for context, each in found.restored.items():
        measured.note(f"{context:,}", ENGINE, first_token=each.first_token, after_one=each.after_one, read=each.read)
    measured.note("alone", ENGINE, again=found.again, step=found.step)


def _turns(name: str, location: str, blob: bytes, measured: Measurements, _: object) -> None:
    measured.note(TURN, name, **states.turns(location, blob))


def _many(name: str, location: str, many: int, measured: Measurements, _: object) -> None:
    took, memory = states.many_states(location, many)
    measured.note(EACH, name, took=took, memory=memory)


def _rows_of_contexts(measured: Measurements) -> list[ReportRow]:
    rows = []
    for context in CONTEXTS:
        first, after, read = (Figure(f"{context:,}", ENGINE, part) for part in ("first_token", "after_one", "read"))
        shortest = Figure(f"{CONTEXTS[0]:,}", ENGINE, "first_token")
        rows += [
            runner.compare(measured, f"context of {context:,} tokens: restored, then the first token", "ms", first, shortest),
            runner.compare(measured, "the same, after one new token", "ms", after),
            runner.compare(measured, "the store's read of that state", "ms", read),
        ]
    again, restored = Figure("alone", ENGINE, "again"), Figure(f"{CONTEXTS[1]:,}", ENGINE, "first_token")
    bar = Bar(at_least=100, reference="restoring it")
    return [
        *rows,
        runner.compare(measured, "a decode step, one run", "ms", Figure("alone", ENGINE, "step")),
        runner.compare(measured, f"a prompt of {states.LONG:,} tokens, fed again", "ms", again, restored, bar),
    ]


def _rows_of_stores(measured: Measurements, names: list[str], size: int, many: int) -> list[ReportRow]:
    rows: list[ReportRow] = []
    for name in names:
        figures = [
            (f"{what} of a turn of {size:,} bytes, {part}", Figure(TURN, name, f"{what}.{part}"))
            for what in ("write", "read")
            for part in PARTS
        ]
        figures += [(f"one of {many:,} {kind}, p50", Figure(EACH, name, f"took.{kind}")) for kind in KINDS]
        rows += [runner.compare(measured, f"{name}: {work}", "ms", figure) for work, figure in figures]
        rows.append(runner.compare(measured, f"{name}: memory for them in this process", "MiB", Figure(EACH, name, "memory")))
    return rows
