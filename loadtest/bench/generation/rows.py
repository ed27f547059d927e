"""The bars, and which figures answer to them. A part that was asked for has its rows, measured or not."""

import statistics
from collections.abc import Mapping, Sequence

from loadtest.bench.generation.measuring import CHUNKS, TEXTS, Figures
from loadtest.bench.generation.plan import Part, Plan
from loadtest.common.report import Bar, Row
from loadtest.in_process import latency
from loadtest.in_process.crossover import crossover, fitted
from loadtest.in_process.shapes import POSITIONS, Shape
from loadtest.in_process.steps import Stretch

FLAT = 1.05  # how much dearer the last thousand tokens may be than the first
DISTURBED = 3.0  # how much longer a token may take while a prompt is fed
SHARED = 4.0  # how much longer a first token may take while one request wants all slots
PER_S = "tokens/s"
MiB, GiB = 2**20, 2**30


def rows(plan: Plan, figures: Figures, ours: Sequence[Stretch], twins: Sequence[Stretch], left_out: Mapping[Part, str]) -> list[Row]:
    """One row for each bar of the plan's parts, and below it what stands beside it. `left_out` says why a row has no figures."""
    made: list[Row] = []
    if Part.engine in plan.parts:
        made += _engine(figures, plan.slots)
    if Part.service in plan.parts:
        made.append(_service(figures, plan.slots))
    if Part.prefill in plan.parts:
        made += _prefill(figures)
    if Part.latency in plan.parts:
        made += _latency(figures)
    if Part.sharing in plan.parts:
        made += _sharing(figures, plan.slots)
    if Part.transformers in plan.parts:
        made.append(_transformers(figures, left_out.get(Part.transformers, "")))
    for shape in plan.shapes:
        if Part.paper in plan.parts:
            made += _paper(figures, shape, left_out.get(Part.paper, ""))
        if Part.batches in plan.parts:
            made.append(_batches(figures, shape, plan.memory_bytes, left_out.get(Part.batches, "")))
    if Part.flat in plan.parts:
        made += _flat(ours)
        made += _growing(ours, twins, left_out.get(Part.flat, ""))
    return made


def _engine(figures: Figures, slots: int) -> list[Row]:
    bar = Bar(at_least=0.9, reference="the bare step loop")
    return [
        _row(f"the engine, {slots} runs", PER_S, _of(figures, "engine", slots), _of(figures, "bare", slots), bar),
        _row(f"the bare step loop, {slots} rows shared out among the cores", PER_S, _of(figures, "bare, shared out")),
        _row("the engine, 1 run", PER_S, _of(figures, "engine", 1), _of(figures, "bare", 1)),
    ]


def _service(figures: Figures, slots: int) -> Row:
    bar = Bar(at_least=0.8, reference="the engine alone")
    return _row(f"the service, {slots} streams over HTTP", PER_S, _of(figures, "service"), _of(figures, "alone"), bar)


def _prefill(figures: Figures) -> list[Row]:
    """The bare prefill is taken at its best chunk."""
    bare = {chunk: _of(figures, "prefill", chunk) for chunk in CHUNKS}
    best = max(bare, key=lambda chunk: statistics.median(bare[chunk]))
    bar = Bar(at_least=0.8, reference=f"bare prefill in chunks of {best}")
    return [
        _row("a long prompt through the engine", PER_S, _of(figures, "prefill", "engine"), bare[best], bar),
        *(_row(f"bare prefill in chunks of {chunk}", PER_S, bare[chunk]) for chunk in CHUNKS),
    ]


def _latency(figures: Figures) -> list[Row]:
    median_s, p99_s = _of(figures, "latency", "median_s"), _of(figures, "latency", "p99_s")
    disturbed_s, prompt_s = _of(figures, "latency", "disturbed p99_s"), _of(figures, "latency", "prompt_s")
    between = f"between two tokens of {latency.STREAMS} streams"
    beside = f"while a prompt of {latency.PROMPT_TOKENS:,} tokens is fed"
    ratios = tuple(p99 / median for p99, median in zip(disturbed_s, median_s, strict=True))
    return [
        _row(f"p99 {between} {beside}, against the undisturbed median", "times as long", ratios, bar=Bar(at_most=DISTURBED)),
        _row(f"{between}, undisturbed, median", "ms", _ms(median_s)),
        _row(f"{between}, undisturbed, p99", "ms", _ms(p99_s)),
        _row(f"{between} {beside}, p99", "ms", _ms(disturbed_s)),
        _row("that prompt, to its first token", "ms", _ms(prompt_s)),
    ]


def _sharing(figures: Figures, slots: int) -> list[Row]:
    told, beside = "another client's first token", f"beside one request for {slots} endless texts"
    alone, disturbed = _of(figures, "sharing", "alone", "p99_s"), _of(figures, "sharing", "beside", "p99_s")
    ratios = tuple(p99 / undisturbed for p99, undisturbed in zip(disturbed, alone, strict=True))
    return [
        _row(f"p99 to {told} {beside}, against undisturbed", "times as long", ratios, bar=Bar(at_most=SHARED)),
        *(
            _row(f"{told}{where}, {name}", "ms", _ms(_of(figures, "sharing", which, f"{name}_s")))
            for which, where in (("alone", ", undisturbed"), ("beside", f" {beside}"))
            for name in ("p50", "p99")
        ),
    ]


def _transformers(figures: Figures, why: str) -> Row:
    bar = Bar(at_least=3, reference="`generate` of transformers with a GPT-2 of this size")
    return _row(f"{TEXTS} texts at once through the engine", PER_S, _of(figures, "texts"), _of(figures, "gpt2"), bar, note=why)


def _paper(figures: Figures, shape: Shape, why: str) -> list[Row]:
    def token_ms(who: str, position: int) -> tuple[float, ...]:
        return _ms(_of(figures, "paper", shape.name, who, position, "s"))

    told, bar = f"a token of the {shape.name} shape at batch 1", Bar(at_most_more=0, reference="the twin")
    made = [
        _row(f"{told}, after {position:,}", "ms", token_ms("ours", position), token_ms("twin", position), bar, note=why)
        for position in POSITIONS
    ]
    ours = token_ms("ours", POSITIONS[0])
    return [*made, _row(f"{told}, beside the paper's on its CPU", "ms", ours, (shape.paper_ms,) * len(ours), note=why)]


def _batches(figures: Figures, shape: Shape, memory_bytes: int, why: str) -> Row:
    """Each at its own best batch."""
    ours, twins = (by_batch(figures, shape, who) for who in ("ours", "twin"))
    told = f"{shape.name} shape, {shape.steps:,} steps, each at its best batch within {memory_bytes / GiB:g} GiB, against the twin"
    if not (ours and twins):
        return _row(told, PER_S, (), note=why)
    best, best_twin = best_batch(ours), best_batch(twins)
    note = f"batch {best:,} of {max(ours):,} that fit, twin {best_twin:,} of {max(twins):,}; paper's GPU: {shape.paper_times:.0f} times"
    return _row(told, PER_S, ours[best], twins[best_twin], note=note)


def by_batch(figures: Figures, shape: Shape, who: str) -> dict[int, tuple[float, ...]]:
    """Tokens a second of "ours" or the "twin"."""
    return {int(work[3]): tuple(found) for work, found in figures.items() if work[:3] == ("batches", shape.name, who)}


def best_batch(found: Mapping[int, Sequence[float]]) -> int:
    """The one with the highest median."""
    return max(found, key=lambda batch: statistics.median(found[batch]))


def _flat(ours: Sequence[Stretch]) -> list[Row]:
    first, last = ours[0], ours[-1]
    gained = (last.rss_bytes - first.rss_bytes) / MiB
    return [
        _row(
            f"a token at position {last.first:,} against one of the first thousand",
            "times as long",
            (last.s_per_token / first.s_per_token,),
            bar=Bar(at_most=FLAT),
        ),
        _row("resident memory gained on the way", "MiB", (gained,)),
    ]


def _growing(ours: Sequence[Stretch], twins: Sequence[Stretch], why: str) -> list[Row]:
    told, price = "a token is cheaper than the twin's from here on", "a token of the twin"
    if not twins:
        return [_row(told, "tokens", (), note=why), _row(price, "ms", (), note=why)]
    position = crossover(beside(ours, twins), twins)
    end = twins[-1].first + twins[-1].tokens
    line = fitted(twins)
    note = f"its line: {line.at_0_s * 1000:.3f} ms + {line.s_per_position * 1e6:.3f} ms a thousand tokens"
    return [
        _row(
            told, "tokens", () if position is None else (position,), note="" if position is not None else "the twin's price does not grow"
        ),
        _row(f"{price} at position {end:,}", "ms", (twins[-1].s_per_token * 1000,), (ours[-1].s_per_token * 1000,), note=note),
    ]


def beside(ours: Sequence[Stretch], twins: Sequence[Stretch]) -> list[Stretch]:
    """Those of ours that took turns with the twin's."""
    return [stretch for stretch in ours if stretch.first <= twins[-1].first]


def _row(
    told: str, unit: str, found: tuple[float, ...], references: tuple[float, ...] = (), bar: Bar | None = None, *, note: str = ""
) -> Row:
    return Row(work=told, unit=unit, figures=found, references=references, bar=bar, note=note)


def _of(figures: Figures, *work: str | int) -> tuple[float, ...]:
    return tuple(figures.get(work, ()))


def _ms(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * second for second in seconds)
