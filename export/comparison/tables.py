"""The tables of the page, as Markdown. Every sentence about a figure is generated from that figure."""

from collections.abc import Iterable, Mapping, Sequence

from export.comparison import deviation, parity
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
    """Return a table of stated costs, measured exponents and the reasons for differences, as in the table of Vaswani et al. 2017."""
    headings = ("layer", "time, stated", "exponent of that", "measured", "memory", "sequential operations", "layers to reach all", "why")
    layers = {name: EVERYTHING[name] for name in results}
    # A causal form has no row, because it costs the same as its encoder form.
    shown = (name for name, layer in layers.items() if layer.cost.row and not layer.capabilities.causal)
    return table(headings, (_complexity_row(results[name], plan) for name in shown))


def _complexity_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    cost = EVERYTHING[result.name].cost
    assert cost.row, f"{result.name} has no row in the complexity table"
    stated, time, memory = deviation.exponents(result, plan)
    path = f"{cost.row.path}; measured {reach(result)} at N = {plan.rank_length}"
    return (
        cost.row.name,
        cost.words,
        deviation.p(stated),
        deviation.p(time),
        deviation.p(memory),
        cost.row.sequential,
        path,
        deviation.explanation(result, plan),
    )


def every_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of all mechanisms: exponents of time and memory, and both values at each mechanism's longest measured N."""
    headings = ("mechanism", "time, stated", "exponent of that", "measured", "memory", "longest N", "there: ms", "MiB", "why")
    return table(headings, (_growth_row(result, plan) for result in results.values() if result.points))


def _growth_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    stated, time, memory = deviation.exponents(result, plan)
    last = result.points[-1]
    at_end = (f"{last.N:,}", f"{last.s * 1000:,.1f}", f"{last.peak_bytes / MiB:,.1f}")
    return (
        f"`{result.name}`",
        EVERYTHING[result.name].cost.words,
        deviation.p(stated),
        deviation.p(time),
        deviation.p(memory),
        *at_end,
        deviation.explanation(result, plan),
    )


def width_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of how the cost grows with sizes other than N, such as the number of landmarks."""
    headings = ("mechanism", "time, stated", "what grows", "ms a run", "exponent stated, with projections", "measured")
    return table(headings, (_width_row(result, plan) for result in results.values() if result.widths))


def _width_row(result: Result, plan: ComparisonPlan) -> tuple[str, ...]:
    stated, measured = deviation.width_exponents(result, plan)
    runs = ", ".join(f"{point.s * 1000:,.1f} at {point.value}" for point in result.widths)
    layer = EVERYTHING[result.name]
    assert layer.examples.varied, f"{result.name} names no option to vary"
    return f"`{result.name}`", layer.cost.words, layer.examples.varied[0], runs, deviation.p(stated), deviation.p(measured)


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


def rank_statements(results: Results, plan: ComparisonPlan) -> str:
    """Return statements about the rank of attention matrices, each with the figures that confirm or contradict it."""
    N, N_words = plan.rank_length, f"N = {plan.rank_length}"
    full = [float(N)] * len(plan.rank_widths)
    bounded = [float(min(width, N)) for width in plan.rank_widths]
    rows = [
        _rank_row("φ(Q) φ(K)ᵀ of elu + 1 has rank D_k", results, "linear", bounded),
        _rank_row(f"softmax(Q Kᵀ) has full rank, {N_words}", results, "softmax", full),
        _rank_row("a causal mask gives it full rank", results, "causal_linear", full),
    ]
    remedies = (
        ("more features", "performer", "linear"),
        ("more features: the exponential to its square", "based", "causal_linear"),
        ("a sharper map", "hedgehog", "causal_linear"),
        ("a gate", "gated_linear", "causal_linear"),
        ("local and linear together", "flash", "linear"),
    )
    rows += [_remedy_row(f"{what} raises the effective rank", results, name, over) for what, name, over in remedies]
    return table(("statement", "measured", "holds"), (row for row in rows if row is not None))


def _rank_row(statement: str, results: Results, name: str, wanted: Sequence[float]) -> tuple[str, ...] | None:
    if name not in results or not results[name].ranks:
        return None
    found = [rank.numerical for rank in results[name].ranks or ()]
    pairs = ", ".join(f"{rank.numerical:.0f} at D_k = {rank.d_head}" for rank in results[name].ranks or ())
    return statement, f"`{name}`: {pairs}", "yes" if found == list(wanted) else "no"


def _remedy_row(statement: str, results: Results, name: str, over: str) -> tuple[str, ...] | None:
    if not all(each in results and results[each].ranks for each in (name, over)):
        return None
    pairs = list(zip(results[name].ranks or (), results[over].ranks or (), strict=True))
    told = ", ".join(f"{ours.effective:.1f} against {theirs.effective:.1f} at D_k = {ours.d_head}" for ours, theirs in pairs)
    raised = [ours.effective > theirs.effective for ours, theirs in pairs]
    return statement, f"`{name}` against `{over}`: {told}", "yes" if all(raised) else "no" if not any(raised) else "not at every width"


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
