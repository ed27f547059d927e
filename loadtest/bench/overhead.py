"""The part `overhead`: the cost of the service around a model, measured with models that compute almost nothing.

The CPU time that all processes of the service use in a load run is divided by the texts, or by the tokens of streams. It includes the
runtime calls; the row of the bare runtime shows how little they are.
"""

import json
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from loadtest.common import memory, texts, wrk
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service
from loadtest.in_process import bare
from loadtest.in_process.tiny_models import export_tiny

PROFILES: dict[str, tuple[str, ...]] = {"single": (), "--lean": ("--lean",), "split": ("--profile", "split")}
# As many slots as the most streams of a form: with the default of 32, most of 256 streams would be refused because of `max_wait_s`.
SLOTS = ("--set", "slots=256")
STREAM_TOKENS = 64
ENCODER, DECODER = "tiny-encoder", "tiny-decoder"
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
        how = " as token ids" * self.token_ids + f" in {self.encoding}" * (self.encoding != "float")
        return f"{what}{how} over {self.connections} connection{'s' * (self.connections > 1)}"

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
FORMS = (
    *(replace(SHORT, connections=connections) for connections in (1, 8, 32, 256)),
    Form(32, encoding="base64"),
    Form(32, token_ids=True),
    Form(8, inputs=32),
    *(Form(connections, stream=True) for connections in (1, 32, 256)),
)


def benchmark(plan: Plan) -> Benchmark:
    """Compare the profiles of the service. The tiny encoder gets the tokenizer of the first bundle."""
    encoder, decoder = plan.folder / ENCODER, plan.folder / DECODER
    export_tiny(plan.bundles[0], encoder, decoder)
    turns = iter(range(10**6))

    def load(form: Form, server: Server) -> Figures:
        return measured(form, server, f"{next(turns)} {form.name}", plan.seconds)

    def warm(server: Server) -> Figures:
        for form in (SHORT, replace(SHORT, stream=True)):
            sent(replace(form, connections=8), server, DECODER, f"warm {next(turns)}", 1.0)
        return {}

    def runtime(_: object) -> Figures:
        tokens = texts.SHORT_WORDS + 2
        timings = bare.measure(encoder, [(1, tokens), (32, tokens)], threads=1, seconds=1.0, spin=False)
        return {f"{B}": _US / timing["texts_per_s"] for (B, _), timing in timings.items()}

    sides = [Side("bare runtime", {"bare": runtime})]
    for profile, flags in PROFILES.items():
        start = partial(Service, [encoder, decoder], *SLOTS, *flags, model=ENCODER)
        sides.append(Side(profile, {"warm-up": warm} | {form.name: partial(load, form) for form in FORMS}, start))
    return Benchmark(sides, rows())


def measured(form: Form, server: Server, seed: str, seconds: float) -> Figures:
    """Return the rate and the CPU time of all processes a text or token."""
    tree = server.family()
    before = [memory.cpu_s([process]) for process in tree]
    load = sent(form, server, DECODER, seed, seconds)
    units, problem = max(load.requests, 1) * form.per_request, "; ".join(load.problems)
    us = {process: _US * (memory.cpu_s([process]) - then) / units for process, then in zip(tree, before, strict=True)}
    most_first = sorted(us, key=lambda process: -us[process])
    by_process = ", ".join(f"{memory.name(process)} {us[process]:.0f}" for process in most_first if us[process] >= 1)
    return {
        form.name: Figure(load.per_s * form.per_request, f"p50 {load.p50_ms:.2f} ms", problem),
        f"{form.name}, us": Figure(sum(us.values()), by_process, problem),
    }


def sent(form: Form, server: Server, decoder: str, seed: str, seconds: float, most_per_s: int = _MOST_PER_S) -> wrk.Load:
    """Load the model of `server` or, with streams, its `decoder`. Bodies are prepared for `most_per_s` texts or tokens per second."""
    count = int(most_per_s * max(seconds, 1)) // form.per_request + form.connections
    model, path = (decoder, "/v1/completions") if form.stream else (server.model, server.path)
    return wrk.run(server.url + path, form.bodies(model, count, seed), connections=form.connections, seconds=seconds)


def rows() -> list[Row]:
    made = [Row(f"bare runtime, {B} texts a call", "us a text", ("bare runtime", f"{B}")) for B in (1, 32)]
    for form in FORMS:
        unit = "token" if form.stream else "text"
        for side in PROFILES:
            made.append(Row(f"{form.name}, {side}", f"{unit}s/s", (side, form.name)))
            bar = Bar(at_most=200) if (side, form) == ("single", SHORT) else None
            made.append(Row(f"the same, {side}, CPU time of all processes", f"us a {unit}", (side, f"{form.name}, us"), bar=bar))
    return made


def _token_ids(count: int, seed: str) -> list[Any]:
    draw = random.Random(f"ids {seed}")
    return [draw.choices(range(*_IDS), k=texts.SHORT_WORDS + 2) for _ in range(count)]
