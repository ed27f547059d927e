"""The exponents of growth of a mechanism: stated by its class, and measured."""

from collections.abc import Callable

from export.comparison import growth
from export.comparison.mechanisms import EVERYTHING, is_attention, work
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Result


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
