"""Measures the parts of `attnserve bench-generate`. In each part the contestants take turns, so that a slow minute of the machine slows all
of them."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from loadtest.bench.generation import over_http
from loadtest.bench.generation.contestants import NEW_TOKENS, Contestants, GenerationPart, GenerationPlan
from loadtest.bench.runner import Contestant, Measurement, Measurements
from loadtest.common.server import attnserve
from loadtest.in_process import batches, engine, latency, steps
from loadtest.in_process.shapes import POSITIONS
from loadtest.in_process.twin import STRETCH, Twin, long_sequences

CHUNKS = (16, 64, 256, 1024)
PROMPT_TOKENS = 16_384  # length in tokens of the prompt whose prefill is measured
TURNS = 3  # turns per round in parts whose ratios are near the required value: several turns average out changes of the machine's speed
TEXTS = 8  # number of texts that transformers, and for comparison the engine, generate at a time


class Measuring:
    """Has one method for each part of the benchmark. Figures are in tokens per second (`per_s`), or in the unit at the end of their
    name."""

    def __init__(self, plan: GenerationPlan, built: Contestants, measured: Measurements) -> None:
        self.plan, self.built, self.measured = plan, built, measured

    def turns(self) -> Sequence[Contestant]:
        """Return the parts that run in every round, then the long sequences, which run once."""
        plan = self.plan
        parts = [part for part in GenerationPart if part in plan.parts - {GenerationPart.flat}]
        rounds = Contestant(plan.model, [Measurement(part, getattr(self, part)) for part in parts])
        if GenerationPart.flat not in plan.parts:
            return [rounds]
        sequences = long_sequences(plan.bundle, plan.tokens, plan.threads, self.built.twin)

        def stretch(_: object) -> None:
            ours, twins = next(sequences)
            for contestant, found in (("bundle", [ours]), ("bundle's twin", twins)):
                for each in found:
                    self.measured.note("long sequence", contestant, **asdict(each))

        ends = (min(first + STRETCH, plan.tokens) for first in range(0, plan.tokens, STRETCH))
        return [rounds, Contestant("one sequence", [Measurement(f"token {end:,} of {plan.tokens:,}", stretch) for end in ends], once=True)]

    def engine(self, _: object) -> None:
        plan, seconds, note = self.plan, self.plan.seconds / TURNS, self.measured.note
        for rows in (1, plan.slots) * TURNS:
            note(f"{rows} runs", "bare", per_s=steps.tokens_per_s(plan.bundle, rows, seconds, plan.threads))
            if rows > 1:
                shared = steps.tokens_per_s(plan.bundle, rows, seconds, plan.threads, share_out=True)
                note(f"{rows} runs", "bare, shared out", per_s=shared)
            note(f"{rows} runs", "engine", per_s=engine.tokens_per_s(plan.bundle, rows, seconds, plan.threads))

    def service(self, _: object) -> None:
        """Measure the engine in this process and the service in turns. The service is idle while the engine is measured."""
        plan, seconds, note = self.plan, self.plan.seconds / TURNS, self.measured.note
        with attnserve(plan.bundle, plan.model) as server:
            for _ in range(TURNS):
                note("streams", "engine", per_s=engine.tokens_per_s(plan.bundle, plan.slots, seconds, plan.threads))
                note("streams", "service", per_s=over_http.tokens_per_s(replace(server, path="/v1/completions"), plan.slots, seconds))

    def prefill(self, _: object) -> None:
        plan, note = self.plan, self.measured.note
        for chunk in CHUNKS:
            note("prefill", f"bare, {chunk}", per_s=steps.prefill_tokens_per_s(plan.bundle, chunk, plan.seconds / 4, plan.threads))
        note("prefill", "engine", per_s=engine.prefill_tokens_per_s(plan.bundle, PROMPT_TOKENS, plan.threads))

    def latency(self, _: object) -> None:
        waits = latency.waits(self.plan.bundle, self.plan.seconds, self.plan.threads)
        figures = {f"p{n}_s": latency.percentile(waits.undisturbed, n) for n in (50, 99)}
        self.measured.note("latency", "engine", **figures, disturbed_p99_s=latency.percentile(waits.during, 99), prompt_s=waits.prompt_s)

    def sharing(self, _: object) -> None:
        plan = self.plan
        with attnserve(plan.bundle, plan.model) as served:
            server = replace(served, path="/v1/completions")
            waits = {"undisturbed": over_http.first_tokens_s(server, plan.seconds)}
            with over_http.all_slots_taken(server, plan.slots):
                waits["disturbed"] = over_http.first_tokens_s(server, plan.seconds)
        for which, found in waits.items():
            self.measured.note("first token", which, **{f"p{n}_s": latency.percentile(found, n) for n in (50, 99)})

    def transformers(self, _: object) -> None:
        plan, gpt2 = self.plan, self.built.gpt2
        if gpt2 is not None:
            self.measured.note("texts", "transformers", per_s=gpt2.tokens_per_s(TEXTS, plan.threads))
            self.measured.note("texts", "engine", per_s=engine.texts_tokens_per_s(plan.bundle, TEXTS, NEW_TOKENS, plan.threads))

    def paper(self, _: object) -> None:
        threads, seconds = self.plan.threads, self.plan.seconds / 10
        for name, pair in self.built.paper.items():
            step = steps.stepping(steps.open_steps(pair.ours, threads), 1)
            twin = Twin(pair.twin, rows=1, capacity=max(POSITIONS) + 1, threads=threads)
            for position in POSITIONS:
                self.measured.note(f"{name} after {position}", "ours", s=steps.median_s(step, seconds))
                self.measured.note(f"{name} after {position}", "twin", s=twin.step_s(position, seconds))

    def batches(self, _: object) -> None:
        threads, seconds, memory_bytes = self.plan.threads, self.plan.seconds / 20, self.plan.memory_bytes
        for shape in self.plan.shapes:
            if pair := self.built.paper.get(shape.name):
                ours = batches.ladder(batches.row_bytes(pair.ours), memory_bytes)
                twins = batches.ladder(batches.twin_row_bytes(pair.twin, shape.steps), memory_bytes)
                measured = {
                    "ours": batches.ours(pair.ours, ours, seconds, threads),
                    "twin": batches.twins(pair.twin, twins, shape.steps, seconds, threads),
                }
                for contestant, found in measured.items():
                    for rows, figure in found.items():
                        self.measured.note(f"{shape.name} batches", contestant, batch=rows, per_s=figure)
