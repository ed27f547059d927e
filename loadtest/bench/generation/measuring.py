"""The parts of a round. In each of them the contestants take turns, so that a slow minute of the machine hits all of them."""

import statistics
from dataclasses import replace
from typing import Any

from loadtest.bench.generation import sharing, streams
from loadtest.bench.generation.contestants import NEW_TOKENS, Contestants
from loadtest.bench.generation.plan import Plan
from loadtest.common.server import attnserve
from loadtest.in_process import batches, engine, latency, steps
from loadtest.in_process.shapes import POSITIONS
from loadtest.in_process.twin import Twin

CHUNKS = (16, 64, 256, 1024)
PROMPT_TOKENS = 16_384  # of the prompt that the engine is fed
TURNS = 3  # in a round of those whose ratio is near its bar: the machine's own speed changes within seconds
TEXTS = 8  # that transformers and the engine generate at once

Figures = dict[tuple[str | int, ...], list[float]]  # of each kind of work, a figure for each round or each turn in it


class Measuring:
    """A method for each part that has rounds. Figures are in tokens a second, or in what their name ends with."""

    def __init__(self, plan: Plan, contestants: Contestants) -> None:
        self.plan, self.contestants = plan, contestants
        self.figures: Figures = {}

    def engine(self) -> None:
        plan, seconds = self.plan, self.plan.seconds / TURNS
        for rows in (1, plan.slots) * TURNS:
            self._note("bare", rows, figure=steps.tokens_per_s(plan.bundle, rows, seconds, plan.threads))
            if rows > 1:
                shared = steps.tokens_per_s(plan.bundle, rows, seconds, plan.threads, share_out=True)
                self._note("bare, shared out", figure=shared)
            self._note("engine", rows, figure=engine.tokens_per_s(plan.bundle, rows, seconds, plan.threads))

    def service(self) -> None:
        """The engine alone is measured beside a service that is idle."""
        plan, seconds = self.plan, self.plan.seconds / TURNS
        with attnserve(plan.bundle, plan.model) as server:
            for _ in range(TURNS):
                self._note("alone", figure=engine.tokens_per_s(plan.bundle, plan.slots, seconds, plan.threads))
                self._note("service", figure=streams.tokens_per_s(replace(server, path="/v1/completions"), plan.slots, seconds))

    def prefill(self) -> None:
        plan = self.plan
        for chunk in CHUNKS:
            self._note("prefill", chunk, figure=steps.prefill_tokens_per_s(plan.bundle, chunk, plan.seconds / 4, plan.threads))
        self._note("prefill", "engine", figure=engine.prefill_tokens_per_s(plan.bundle, PROMPT_TOKENS, plan.threads))

    def latency(self) -> None:
        waits = latency.waits(self.plan.bundle, self.plan.seconds, self.plan.threads)
        self._note("latency", "median_s", figure=statistics.median(waits.undisturbed))
        self._note("latency", "p99_s", figure=latency.percentile(waits.undisturbed, 99))
        self._note("latency", "disturbed p99_s", figure=latency.percentile(waits.during, 99))
        self._note("latency", "prompt_s", figure=waits.prompt_s)

    def sharing(self) -> None:
        plan = self.plan
        with attnserve(plan.bundle, plan.model) as served:
            server = replace(served, path="/v1/completions")
            waits = {"alone": sharing.first_tokens_s(server, plan.seconds)}
            with sharing.all_slots_taken(server, plan.slots):
                waits["beside"] = sharing.first_tokens_s(server, plan.seconds)
        for which, found in waits.items():
            for percent in (50, 99):
                self._note("sharing", which, f"p{percent}_s", figure=latency.percentile(found, percent))

    def transformers(self) -> None:
        plan, gpt2 = self.plan, self.contestants.gpt2
        if gpt2 is not None:
            self._note("gpt2", figure=gpt2.tokens_per_s(TEXTS, plan.threads))
            self._note("texts", figure=engine.texts_tokens_per_s(plan.bundle, TEXTS, NEW_TOKENS, plan.threads))

    def paper(self) -> None:
        threads, seconds = self.plan.threads, self.plan.seconds / 10
        for shape in self.plan.shapes:
            if pair := self.contestants.paper.get(shape.name):
                step = steps.stepping(steps.open_steps(pair.ours, threads), 1)
                twin = Twin(pair.twin, rows=1, capacity=max(POSITIONS) + 1, threads=threads)
                for position in POSITIONS:
                    self._note("paper", shape.name, "ours", position, "s", figure=steps.median_s(step, seconds))
                    self._note("paper", shape.name, "twin", position, "s", figure=twin.step_s(position, seconds))

    def batches(self) -> None:
        threads, seconds = self.plan.threads, self.plan.seconds / 20
        for shape in self.plan.shapes:
            if pair := self.contestants.paper.get(shape.name):
                ours = batches.ladder(batches.row_bytes(pair.ours), self.plan.memory_bytes)
                twins = batches.ladder(batches.twin_row_bytes(pair.twin, shape.steps), self.plan.memory_bytes)
                for rows, figure in batches.ours(pair.ours, ours, seconds, threads).items():
                    self._note("batches", shape.name, "ours", rows, figure=figure)
                for rows, figure in batches.twins(pair.twin, twins, shape.steps, seconds, threads).items():
                    self._note("batches", shape.name, "twin", rows, figure=figure)

    def raw(self) -> list[dict[str, Any]]:
        return [{"work": " ".join(map(str, work)), "figures": figures} for work, figures in self.figures.items()]

    def _note(self, *work: str | int, figure: float) -> None:
        self.figures.setdefault(work, []).append(figure)
