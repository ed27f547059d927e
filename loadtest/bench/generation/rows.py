"""Makes the rows of the report, with the required values. A part that was requested has rows even if it was not measured."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from loadtest.bench.generation.contestants import GenerationPart, GenerationPlan
from loadtest.bench.generation.measuring import CHUNKS, TEXTS
from loadtest.bench.runner import Figure, Measurements, compare
from loadtest.common.report import Bar, ReportRow
from loadtest.in_process import latency
from loadtest.in_process.shapes import POSITIONS, ModelShape
from loadtest.in_process.steps import Stretch
from loadtest.in_process.twin import crossover, fitted

FLAT = 1.05  # longest allowed time per token at the end of a long sequence, as a multiple of the time in its first thousand tokens
DISTURBED = 3.0  # longest allowed p99 time between tokens while another prompt is prefilled, as a multiple of the undisturbed median
SHARED = 4.0  # longest allowed p99 time to the first token while another request has all slots, as a multiple of the p99 without it
PER_S, TIMES = "tokens/s", "times as long"
MiB, GiB = 2**20, 2**30


def rows(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    """Return the report's rows for the plan's parts: one for each required value, and rows for comparison that have no required value."""
    return [row for part, made in PARTS.items() if part in plan.parts for row in made(plan, measured)]


def _engine(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    work, slots = f"{plan.slots} runs", plan.slots
    bar = Bar(at_least=0.9, reference="the bare step loop")
    return [
        compare(measured, f"the engine, {slots} runs", PER_S, Figure(work, "engine"), Figure(work, "bare"), bar),
        compare(measured, f"the bare step loop, {slots} rows shared out among the cores", PER_S, Figure(work, "bare, shared out")),
        compare(measured, "the engine, 1 run", PER_S, Figure("1 runs", "engine"), Figure("1 runs", "bare")),
    ]


def _service(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    bar, work = Bar(at_least=0.8, reference="the engine alone"), f"the service, {plan.slots} streams over HTTP"
    return [compare(measured, work, PER_S, Figure("streams", "service"), Figure("streams", "engine"), bar)]


def _prefill(_: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    """Compare the engine's prefill with the bare runtime's prefill at its best chunk length."""
    bare = {chunk: Figure("prefill", f"bare, {chunk}") for chunk in CHUNKS}
    best = max(bare, key=lambda chunk: statistics.median(bare[chunk].of(measured)))
    bar = Bar(at_least=0.8, reference=f"bare prefill in chunks of {best}")
    return [
        compare(measured, "a long prompt through the engine", PER_S, Figure("prefill", "engine"), bare[best], bar),
        *(compare(measured, f"bare prefill in chunks of {chunk}", PER_S, figure) for chunk, figure in bare.items()),
    ]


def _latency(_: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    between = f"between two tokens of {latency.STREAMS} streams"
    beside = f"while a prompt of {latency.PROMPT_TOKENS:,} tokens is fed"
    ratio = Figure("latency", "engine", "disturbed_p99_s", over=Figure("latency", "engine", "p50_s"))
    in_ms = {
        f"{between}, undisturbed, median": "p50_s",
        f"{between}, undisturbed, p99": "p99_s",
        f"{between} {beside}, p99": "disturbed_p99_s",
        "that prompt, to its first token": "prompt_s",
    }
    return [
        compare(measured, f"p99 {between} {beside}, against the undisturbed median", TIMES, ratio, bar=Bar(at_most=DISTURBED)),
        *(compare(measured, work, "ms", Figure("latency", "engine", name, 1000)) for work, name in in_ms.items()),
    ]


def _sharing(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    work, beside = "another client's first token", f"beside one request for {plan.slots} endless texts"
    ratio = Figure("first token", "disturbed", "p99_s", over=Figure("first token", "undisturbed", "p99_s"))
    return [
        compare(measured, f"p99 to {work} {beside}, against undisturbed", TIMES, ratio, bar=Bar(at_most=SHARED)),
        *(
            compare(measured, f"{work}{where}, {name}", "ms", Figure("first token", which, f"{name}_s", 1000))
            for which, where in (("undisturbed", ", undisturbed"), ("disturbed", f" {beside}"))
            for name in ("p50", "p99")
        ),
    ]


def _transformers(_: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    bar = Bar(at_least=3, reference="`generate` of transformers with a GPT-2 of this size")
    work = f"{TEXTS} texts at once through the engine"
    return [compare(measured, work, PER_S, Figure("texts", "engine"), Figure("texts", "transformers"), bar)]


def _paper(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    made, bar = [], Bar(at_most_more=0, reference="the twin")
    for shape in plan.shapes:
        work = f"a token of the {shape.name} shape at batch 1"
        ours, twins = ({N: Figure(f"{shape.name} after {N}", who, "s", 1000) for N in POSITIONS} for who in ("ours", "twin"))
        made += [compare(measured, f"{work}, after {N:,}", "ms", ours[N], twins[N], bar) for N in POSITIONS]
        row = compare(measured, f"{work}, beside the paper's on its CPU", "ms", ours[POSITIONS[0]])
        made.append(replace(row, references=(shape.paper_ms,) * len(row.figures)))
    return made


def _batches(plan: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    """Compare the decoder with its softmax twin, each at its own best batch size."""
    made = []
    for shape in plan.shapes:
        ours, twins = (by_batch(measured, shape, who) for who in ("ours", "twin"))
        within = f"{plan.memory_bytes / GiB:g} GiB"
        work = f"{shape.name} shape, {shape.steps:,} steps, each at its best batch within {within}, against the twin"
        row = ReportRow(work=work, unit=PER_S, note=measured.absent.get("twin", ""))
        if ours and twins:
            best, best_twin = best_batch(ours), best_batch(twins)
            note = f"batch {best:,} of {max(ours):,} that fit, twin {best_twin:,} of {max(twins):,}"
            note += f"; paper's GPU: {shape.paper_times:.0f} times"
            row = replace(row, figures=ours[best], references=twins[best_twin], note=note)
        made.append(row)
    return made


def by_batch(measured: Measurements, shape: ModelShape, contestant: str) -> dict[int, tuple[float, ...]]:
    """Return batch size -> tokens per second, one value per round. `contestant` is "ours" or "twin" (the same decoder with softmax)."""
    found: dict[int, tuple[float, ...]] = {}
    for entry in measured.of(f"{shape.name} batches", contestant):
        found[entry["batch"]] = (*found.get(entry["batch"], ()), entry["per_s"])
    return found


def best_batch(found: Mapping[int, Sequence[float]]) -> int:
    """Return the batch size with the highest median."""
    return max(found, key=lambda batch: statistics.median(found[batch]))


def stretches(measured: Measurements, contestant: str) -> list[Stretch]:
    """Return the measured stretches of the long sequence; `contestant` is "bundle" or "bundle's twin"."""
    found = measured.of("long sequence", contestant)
    return [Stretch(**{each.name: entry[each.name] for each in fields(Stretch)}) for entry in found]


def _flat(_: GenerationPlan, measured: Measurements) -> list[ReportRow]:
    ours, twins = stretches(measured, "bundle"), stretches(measured, "bundle's twin")
    first, last = ours[0], ours[-1]
    work, ratio = f"a token at position {last.first:,} against one of the first thousand", last.s_per_token / first.s_per_token
    gained = (last.rss_bytes - first.rss_bytes) / MiB
    made = [
        ReportRow(work=work, unit=TIMES, figures=(ratio,), bar=Bar(at_most=FLAT)),
        ReportRow(work="resident memory gained on the way", unit="MiB", figures=(gained,)),
    ]
    cheaper, price = "a token is cheaper than the twin's from here on", "a token of the twin"
    if not twins:
        why = measured.absent.get("bundle's twin", "")
        return [*made, ReportRow(work=cheaper, unit="tokens", note=why), ReportRow(work=price, unit="ms", note=why)]
    position, line = crossover(measured_with_twin(ours, twins), twins), fitted(twins)
    end = twins[-1].first + twins[-1].tokens
    return [
        *made,
        ReportRow(work=cheaper, unit="tokens", note="the twin's price does not grow")
        if position is None
        else ReportRow(work=cheaper, unit="tokens", figures=(position,)),
        ReportRow(
            work=f"{price} at position {end:,}",
            unit="ms",
            figures=(twins[-1].s_per_token * 1000,),
            references=(ours[-1].s_per_token * 1000,),
            note=f"its line: {line.at_0_s * 1000:.3f} ms + {line.s_per_position * 1e6:.3f} ms a thousand tokens",
        ),
    ]


def measured_with_twin(ours: Sequence[Stretch], twins: Sequence[Stretch]) -> list[Stretch]:
    """Return the stretches of the bundle's decoder (`ours`) that were measured in turns with stretches of its softmax twin."""
    return [stretch for stretch in ours if stretch.first <= twins[-1].first]


PARTS: dict[GenerationPart, Callable[[GenerationPlan, Measurements], list[ReportRow]]] = {
    GenerationPart.engine: _engine,
    GenerationPart.service: _service,
    GenerationPart.prefill: _prefill,
    GenerationPart.latency: _latency,
    GenerationPart.sharing: _sharing,
    GenerationPart.transformers: _transformers,
    GenerationPart.paper: _paper,
    GenerationPart.batches: _batches,
    GenerationPart.flat: _flat,
}
