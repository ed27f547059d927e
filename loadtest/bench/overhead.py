"""The part `overhead` of `attnserve bench`: the cost of the service around a model, measured with models that compute almost nothing.

The CPU time that all processes of the service use in a load run is divided by the texts, or by the tokens of streams. It includes the
runtime calls; the row of the bare runtime shows how little they are.
"""

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.bench import runner
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common import memory, stacks, texts, wrk
from loadtest.common.report import Bar, ReportRow
from loadtest.common.server import MeasuredServer, attnserve, running
from loadtest.in_process import bare
from service.deployment.ports import free_port

PROFILES: dict[str, tuple[str, ...]] = {"single": (), "--lean": ("--lean",), "split": ("--profile", "split")}
# As many slots as the most streams of a form: with the default of 32, most of 256 streams would be refused because of `max_wait_s`.
_SLOTS = ("--set", "slots=256")
# Servers of one process that answer every request with the same vector, for scale.
_APP = "loadtest.bench.hello:app"
HELLO = {
    "uvicorn, nothing computed": ("uvicorn", _APP, "--loop", "uvloop", "--http", "httptools", "--no-access-log", "--port"),
    "granian, nothing computed": ("granian", "--interface", "asgi", _APP, "--loop", "uvloop", "--no-access-log", "--port"),
}
STREAM_TOKENS = 64
ENCODER, DECODER = "tiny-encoder", "tiny-decoder"
BARE, PHASES = "bare runtime", "CPU time by phase"
BATCHES = {1: "bare runtime, one text a call", 32: "bare runtime, 32 texts a call"}
_IDS = (1_000, 20_000)  # token ids of BERT's vocabulary that are whole words or parts of words
_MOST_PER_S = 60_000  # texts that are prepared for each second of a load run: more than any server answers on two cores
_US = 1e6


@dataclass(frozen=True)
class Form:
    """The form of the requests of one load run, and the number of connections. `encoding` is OpenAI's `encoding_format`."""

    connections: int
    inputs: int = 1
    encoding: str = "float"
    token_ids: bool = False
    stream: bool = False

    @property
    def name(self) -> str:
        what = f"streams of {STREAM_TOKENS} tokens" if self.stream else f"{self.inputs} text{'s' * (self.inputs > 1)} a request"
        how = ", as token ids" * self.token_ids + f", {self.encoding}" * (self.encoding != "float")
        return f"{what}{how}, {self.connections} connection{'s' * (self.connections > 1)}"

    @property
    def cpu(self) -> str:
        return f"{self.name}: CPU time of all processes of the service"

    @property
    def per_request(self) -> int:
        """Return the number of texts, or of tokens of a stream, in a request."""
        return STREAM_TOKENS if self.stream else self.inputs

    def bodies(self, model: str, count: int, seed: str) -> list[str]:
        """Return the bodies of `count` requests, of which no two have an input in common."""
        if self.stream:
            asked = {"model": model, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
            return [json.dumps({**asked, "prompt": f"{seed} {number}"}) for number in range(count)]
        inputs = _token_ids(count * self.inputs, seed) if self.token_ids else texts.short(count * self.inputs, seed)
        asked = {"model": model, "encoding_format": self.encoding}
        rows = (inputs[at : at + self.inputs] for at in range(0, len(inputs), self.inputs))
        return [json.dumps({**asked, "input": row if self.inputs > 1 else row[0]}) for row in rows]


SHORT = Form(32)
HELLO_FORMS = (Form(1), SHORT)
FORMS = (
    *(replace(SHORT, connections=connections) for connections in (1, 8, 32, 256)),
    Form(32, encoding="base64"),
    Form(32, token_ids=True),
    Form(8, inputs=32),
    Form(8, inputs=32, encoding="base64"),
    *(Form(connections, stream=True) for connections in (1, 32, 256)),
)


class Overhead:
    """The contestants of this part: the profiles of the service. `tokenizer` is a bundle whose tokenizer the tiny encoder gets."""

    def __init__(self, tokenizer: Path, folder: Path, seconds: float, measured: Measurements) -> None:
        self._tokenizer, self._folder, self._seconds, self._measured = tokenizer, folder, seconds, measured
        self._sampler = stacks.binary()
        if self._sampler is None:
            measured.absent[PHASES] = "py-spy, which samples stacks, is not installed: pip install py-spy"

    def contestants(self) -> list[Contestant]:
        hello = [
            Contestant(
                server, [Measurement(form.name, partial(self._load, server, form)) for form in HELLO_FORMS], partial(_hello, command)
            )
            for server, command in HELLO.items()
        ]
        return hello + [
            Contestant(
                profile,
                [
                    *([Measurement(BARE, self._bare)] if profile == "single" else []),
                    *(Measurement(form.name, partial(self._load, profile, form)) for form in FORMS),
                    *([Measurement(PHASES, self._phases)] if profile == "single" and self._sampler else []),
                ],
                partial(self._service, flags),
            )
            for profile, flags in PROFILES.items()
        ]

    @contextmanager
    def _service(self, flags: Sequence[str]) -> Iterator[MeasuredServer]:
        from loadtest.in_process.tiny_models import export_tiny  # imports torch, which other parts do not need

        encoder, decoder = self._folder / ENCODER, self._folder / DECODER
        export_tiny(self._tokenizer, encoder, decoder)
        with attnserve(encoder, ENCODER, flags=("--bundle", str(decoder), *_SLOTS, *flags)) as server:
            for form in (SHORT, replace(SHORT, stream=True)):
                self._run(replace(form, connections=8), server, "warm", 1.0)
            yield server

    def _bare(self, _: MeasuredServer) -> None:
        tokens = texts.SHORT_WORDS + 2
        timings = bare.measure(self._folder / ENCODER, [(1, tokens), (32, tokens)], threads=1, seconds=1.0, spin=False)
        for shape, timing in timings.items():
            self._measured.note(BATCHES[shape[0]], BARE, us=_US / timing["texts_per_s"])

    def _load(self, profile: str, form: Form, server: MeasuredServer) -> None:
        tree = memory.tree(server.pid)
        before = [memory.cpu_s([process]) for process in tree]
        load = self._run(form, server, f"{profile} {self._measured.round} {form.name}", self._seconds)
        units = max(load.requests, 1) * form.per_request
        us = {process: _US * (memory.cpu_s([process]) - then) / units for process, then in zip(tree, before, strict=True)}
        most_first = sorted(us, key=lambda process: -us[process])
        by_process = ", ".join(f"{memory.name(process)} {us[process]:.0f}" for process in most_first if us[process] >= 1)
        self._measured.note(
            form.name,
            profile,
            per_s=load.per_s * form.per_request,
            problems=load.problems,
            wrk=load.__dict__,
            note=f"p50 {load.p50_ms:.2f} ms",
        )
        self._measured.note(form.cpu, profile, us=sum(us.values()), problems=load.problems, note=by_process)

    def _run(self, form: Form, server: MeasuredServer, seed: str, seconds: float) -> wrk.Load:
        count = int(_MOST_PER_S * max(seconds, 1)) // form.per_request + form.connections
        model, path = (DECODER, "/v1/completions") if form.stream else (ENCODER, server.path)
        bodies = form.bodies(model, count, seed)
        return wrk.run(server.address + path, bodies, connections=form.connections, seconds=seconds)

    def _phases(self, server: MeasuredServer) -> None:
        """Divide the CPU time of the process that answers among the phases of a request, under the load of short texts."""
        tree = memory.tree(server.pid)
        answering = max(tree, key=lambda process: memory.cpu_s([process]))
        before = memory.cpu_s([answering])
        with stacks.sampled(answering.pid, self._seconds) as found:
            load = self._run(SHORT, server, f"phases {self._measured.round}", self._seconds)
            used_us = _US * (memory.cpu_s([answering]) - before) / max(load.requests, 1)
        for phase, samples in found.most_common():
            share = samples / found.total()
            self._measured.note(phase, PHASES, us=share * used_us, note=f"{100 * share:.0f} % of the process that answers")


def rows(measured: Measurements) -> list[ReportRow]:
    """Return the rows of the report: CPU time a text or a token, for each profile and form, then the phases of profile single."""
    made = [runner.compare(measured, work, "us a text", Figure(work, BARE, "us")) for work in BATCHES.values()]
    bars = {("single", SHORT): Bar(at_most=200)}
    for form in FORMS:
        unit = "token" if form.stream else "text"
        for profile in PROFILES:
            made.append(runner.compare(measured, f"{form.name}, {profile}", f"{unit}s/s", Figure(form.name, profile)))
            cpu, bar = Figure(form.cpu, profile, "us"), bars.get((profile, form))
            made.append(runner.compare(measured, f"the same, {profile}, CPU time", f"us a {unit}", cpu, bar=bar))
        for server in HELLO if form in HELLO_FORMS else ():
            made.append(runner.compare(measured, f"{form.name}, {server}", "requests/s", Figure(form.name, server)))
            made.append(runner.compare(measured, f"the same, {server}, CPU time", "us a request", Figure(form.cpu, server, "us")))
    phases = (phase for phase, _ in stacks.PHASES if measured.of(phase, PHASES))
    return made + [runner.compare(measured, f"phase: {phase}", "us a text", Figure(phase, PHASES, "us")) for phase in phases]


@contextmanager
def _hello(command: Sequence[str]) -> Iterator[MeasuredServer]:
    port = free_port()
    with running(command[0], [sys.executable, "-m", *command, str(port)], dict(os.environ), f"http://127.0.0.1:{port}/") as (
        process,
        start_s,
    ):
        yield MeasuredServer(name=command[0], pid=process.pid, port=port, path="/v1/embeddings", model="hello", start_s=start_s)


def _token_ids(count: int, seed: str) -> list[Any]:
    draw = random.Random(f"ids {seed}")
    return [draw.choices(range(*_IDS), k=texts.SHORT_WORDS + 2) for _ in range(count)]
