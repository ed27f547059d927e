"""The tables of the page, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from export.comparison import exponents, parity
from export.comparison.mechanisms import EVERYTHING, words
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Result

KiB, MiB = 2**10, 2**20

Results = Mapping[str, Result]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


# Growth


def complexity(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of stated costs and measured exponents, as in the table of Vaswani et al. 2017."""
    headings = ("layer", "time, stated", "exponent of that", "measured", "memory", "sequential steps", "layers to reach all", "stopped")
    layers = {name: EVERYTHING[name] for name in results}
    # A causal form has no row, because it costs the same as its encoder form.
    shown = (name for name, layer in layers.items() if layer.cost.row and not layer.capabilities.causal)
    return table(headings, (_complexity_row(results[name], plan) for name in shown))


def _complexity_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    cost = EVERYTHING[result.name].cost
    assert cost.row, f"{result.name} has no row in the complexity table"
    grown = map(exponents.p, exponents.exponents(result, plan))
    path = f"{cost.row.path}; measured {reach(result)} at N = {plan.rank_length}"
    return (cost.row.name, cost.words, *grown, cost.row.sequential, path, result.ended or "")


def every_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of all mechanisms: exponents of time and memory, and both values at each mechanism's longest measured N."""
    headings = ("mechanism", "time, stated", "exponent of that", "measured", "memory", "longest N", "there: ms", "MiB", "stopped")
    return table(headings, (_growth_row(result, plan) for result in results.values() if result.points))


def _growth_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    grown = map(exponents.p, exponents.exponents(result, plan))
    last = result.points[-1]
    at_end = (f"{last.N:,}", f"{last.s * 1000:,.1f}", f"{last.peak_bytes / MiB:,.1f}")
    return (f"`{result.name}`", EVERYTHING[result.name].cost.words, *grown, *at_end, result.ended or "")


def width_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of how the cost grows with sizes other than N, such as the number of landmarks."""
    headings = ("mechanism", "time, stated", "what grows", "ms a run", "exponent stated, with projections", "measured")
    return table(headings, (_width_row(result, plan) for result in results.values() if result.widths))


def _width_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    stated, measured = exponents.width_exponents(result, plan)
    runs = ", ".join(f"{point.s * 1000:,.1f} at {point.value}" for point in result.widths)
    layer = EVERYTHING[result.name]
    assert layer.examples.varied, f"{result.name} names no option to vary"
    return f"`{result.name}`", layer.cost.words, layer.examples.varied[0], runs, exponents.p(stated), exponents.p(measured)


# Capabilities and operators


def abilities(results: Results) -> str:
    headings = (
        "mechanism",
        "causal",
        "cross",
        "rotary positions",
        "pair mask and bias",
        "knows order",
        "averages",
        "pads N to",
        "state of a sequence",
    )
    return table(headings, (_abilities_row(result) for result in results.values()))


def _abilities_row(result: Result) -> tuple[str, ...]:
    can = EVERYTHING[result.name].capabilities
    flags = (can.causal, can.cross, can.rotates, can.pairs, can.ordered, can.averages)
    return (f"`{result.name}`", *("yes" if flag else "" for flag in flags), can.pads_to or "", state(result))


def state(result: Result) -> str:
    """Describe the size of a sequence's state: constant, or bytes per token."""
    if not result.state_bytes:
        return ""
    (first, before), (last, after) = sorted(result.state_bytes.items())
    if before == after:
        return f"{after / KiB:,.1f} KiB, however long"
    return f"{(after - before) / (last - first):,.0f} B a token"


def operators(results: Results) -> str:
    rows = ((f"`{name}`", str(sum(r.operators.values())), _counts(r.operators)) for name, r in results.items())
    return table(("mechanism", "nodes", "operators"), rows)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" if count > 1 else name for name, count in found.items())


def parities(results: Results, plan: ComparisonPlan) -> str:
    sizes = [f"{B} x {N}" for B, N in plan.parity_sizes]
    return table(("mechanism", *sizes, f"at most {parity.BAR:g}"), (_parity_row(result) for result in results.values() if result.parity))


def _parity_row(result: Result) -> tuple[str, ...]:
    errors = [size.max_abs_error for size in result.parity or ()]
    return (f"`{result.name}`", *(f"{error:.1e}" for error in errors), "yes" if max(errors) <= parity.BAR else "**NO**")


# Ranks


def ranks(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of numerical and effective rank for each width of a head."""
    rows = (
        (f"`{name}`", *(f"{rank.numerical:.0f} / {rank.effective:.1f}" for rank in result.ranks))
        for name, result in results.items()
        if result.ranks
    )
    return table(("mechanism", *(f"D_k = {width}" for width in plan.rank_widths)), rows)


def reach(result: Result) -> str:
    return "never, however many," if result.layers_to_reach == 0 else str(result.layers_to_reach)


# One section per mechanism


def mechanism(result: Result) -> str:
    """Return the formula, paper and cost of a mechanism, from the docstring of its file."""
    told = words(result.name)
    link = f" [arXiv:{told.paper}](https://arxiv.org/abs/{told.paper})" if told.paper else ""
    return f"### {result.name}\n\n{told.title}{link}\n\n```\n{told.body}\n```\n"


def widths(results: Results) -> str:
    """Describe the options that the layers were built with."""
    large = {name: EVERYTHING[name].examples.large for name in results}
    rows = ((f"`{name}`", ", ".join(f"{key} {value}" for key, value in options.items())) for name, options in large.items() if options)
    return table(("mechanism", "built with"), rows)
