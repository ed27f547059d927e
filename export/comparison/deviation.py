"""Explains why the exponent of a mechanism's measured time agrees with that of its stated cost or differs, with figures."""

from collections.abc import Callable
from pathlib import Path

from export.comparison import growth
from export.comparison.mechanisms import EVERYTHING, is_attention, work
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Result

CLOSE = 0.15  # two exponents that differ by less than this are reported as equal
MiB = 2**20


def explanation(result: Result, plan: ComparisonPlan) -> str:
    """Return a sentence that explains why the exponent of the measured time agrees with that of the stated cost or differs from it."""
    stated, time, _ = exponents(result, plan)
    ended = f" Stopped: {result.ended}." if result.ended else ""
    if stated is None or time is None:
        return f"too few lengths from N = {growth.GROWTH_FROM:,} on for an exponent.{ended}"
    if abs(time - stated) < CLOSE:
        return f"as stated.{ended}"
    return (_slower if time > stated else _faster)(result, plan, time) + ended


def _faster(result: Result, plan: ComparisonPlan, time: float) -> str:
    """Explain a measured exponent below the stated one. The reason is work that grows more slowly with N and takes much of the time."""
    lengths, seconds = [point.N for point in result.points], [point.s for point in result.points]
    stated, size = work_of(result, plan), result.linear_weights
    with_projections = growth.stated_exponent(lambda N: stated(N) + size * N, lengths)
    last = growth.last_exponent(lengths, seconds)
    share = size / (stated(lengths[-1]) / lengths[-1] + size)
    told = f"the projections, which the statement leaves out, are {share:.0%} of the multiply-adds at N = {lengths[-1]:,}"
    if with_projections is not None and abs(with_projections - time) < CLOSE:
        return f"{told}; with them the statement has exponent {with_projections:.2f}."
    ending = f"the exponent of the last doubling is {last:.2f}" if last is not None else ""
    return f"less than its pairs' share: {told} (exponent with them {p(with_projections)}), and {ending}."


def _slower(result: Result, plan: ComparisonPlan, time: float) -> str:
    """Explain a measured exponent above the stated one. The reason is that one multiply-add takes longer at larger N."""
    stated, size = work_of(result, plan), result.linear_weights
    measured = [point for point in result.points if point.N >= growth.GROWTH_FROM]
    first, last = measured[0], measured[-1]
    cost = [point.s / (stated(point.N) + size * point.N) for point in (first, last)]
    return (
        f"a multiply-add takes {cost[1] / cost[0]:.1f} times as long at N = {last.N:,} as at {first.N:,}, where a run works on "
        f"{last.peak_bytes / MiB:,.1f} MiB in the place of {first.peak_bytes / MiB:,.1f}{_cache()}."
    )


def _cache() -> str:
    """Return a clause with the size of the processor's largest cache; empty if the system does not report it."""
    sizes = [int(file.read_text().strip().rstrip("K")) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return f"; the largest cache holds {max(sizes) / 1024:,.0f} MiB" if sizes else ""


def exponents(result: Result, plan: ComparisonPlan) -> tuple[float | None, float | None, float | None]:
    """Return the exponents with which the stated cost, the measured time and the measured memory grow with N."""
    lengths = [point.N for point in result.points]
    time = growth.exponent(lengths, [point.s for point in result.points])
    memory = growth.exponent(lengths, [float(point.peak_bytes) for point in result.points])
    return growth.stated_exponent(work_of(result, plan), lengths), time, memory


def work_of(result: Result, plan: ComparisonPlan) -> Callable[[int], float]:
    """Return the stated multiply-adds as a function of N."""
    return lambda N: work(result.name, N, plan.d_model, plan.n_heads, longest=plan.longest)


def width_exponents(result: Result, plan: ComparisonPlan) -> tuple[float | None, float | None]:
    """Return the exponents with which the stated cost (including projections) and the measured time grow with an option of the mechanism,
    which `examples.varied` names."""
    varied = EVERYTHING[result.name].examples.varied
    assert varied, f"{result.name} names no option to vary"
    option = varied[0]
    values, N = [point.value for point in result.widths], plan.width_length
    projections = result.linear_weights * N if is_attention(result.name) else 0
    stated = [
        work(result.name, N, plan.d_model, plan.n_heads, longest=plan.longest, more={option: value}) + projections for value in values
    ]
    return growth.exponent(values, stated, begin=0), growth.exponent(values, [point.s for point in result.widths], begin=0)


def p(exponent: float | None) -> str:
    return "" if exponent is None else f"{exponent:.2f}"
