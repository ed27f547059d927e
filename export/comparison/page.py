"""Writes the page with all results, compare.md, and its pictures."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import onnxruntime as ort
import torch
from matplotlib.figure import Figure

from export.comparison import growth, layer_graph
from export.comparison.growth import Point
from export.comparison.mechanisms import EVERYTHING, is_attention, work
from export.comparison.run import ComparisonPlan, Result
from export.errors import ExportError
from export.folder import now
from models.folders.folder import in_sentences

KiB, MiB = 2**10, 2**20
PICTURES = {"compare-time.svg": "Milliseconds of a run", "compare-memory.svg": "MiB that a run adds", "compare-ranks.svg": "Effective rank"}
SHOWN_EVERYWHERE = ("softmax", "linear")  # drawn in every panel as references for growth like N² and N
STYLES = ("-", "--", ":", "-.")

Results = Mapping[str, Result]


def write(results: Results, plan: ComparisonPlan, out: Path) -> Path:
    """Write the pictures and compare.md, and return its path. Raises ExportError if a file cannot be written."""
    with in_sentences(f"{out} cannot take the page", ExportError):
        out.mkdir(parents=True, exist_ok=True)
        draw_growth(results, out / "compare-time.svg", what="ms a run", value=lambda point: point.s * 1000)
        draw_growth(results, out / "compare-memory.svg", what="MiB a run adds", value=lambda point: point.peak_bytes / MiB)
        draw_ranks(results, plan, out / "compare-ranks.svg")
        (page := out / "compare.md").write_text(markdown(results, plan, out), encoding="utf-8")
    return page


def markdown(results: Results, plan: ComparisonPlan, out: Path) -> str:
    """Return the page as Markdown. Pictures that do not exist in `out` are left out."""
    missing = [f"`{name}`" + (f" ({result.failure})" if result.failure else "") for name, result in results.items() if not result.complete]
    parts = [
        "# Attention mechanisms side by side\n",
        _about(plan),
        *([f"**Not finished**: {'; '.join(missing)}. The command that began goes on with it.\n"] if missing else []),
        "## The complexity table, measured\n",
        f"Exponents are fitted to time and memory from N = {growth.GROWTH_FROM:,} on, stated ones to the stated formula over the same "
        "lengths.\n",
        complexity(results, plan),
        _picture("compare-time.svg", out),
        _picture("compare-memory.svg", out),
        f"### The other letters, at N = {plan.width_length:,}\n",
        "Exponents are fitted to time against the option; a rate divides the work, so its own is negative.\n",
        width_growth(results, plan),
        "## Growth of every mechanism\n",
        every_growth(results, plan),
        "## Rank\n",
        _picture("compare-ranks.svg", out),
        "## What each can do\n",
        f"The last column is the largest difference of an output from torch's, both in float32; {layer_graph.BAR:g} is the bar.\n",
        abilities(results),
    ]
    return "\n".join(part for part in parts if part)


def _about(plan: ComparisonPlan) -> str:
    """Return a paragraph on the machine, the versions and the method of the measurements."""
    named = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return (
        f"Written by `attnserve compare`, {now()}, on {named[0] if named else platform.machine()}, {len(named) or 1} processors; "
        f"onnxruntime {ort.__version__}, torch {torch.__version__}. Measured is the exported graph in onnxruntime: B = 1, one thread, "
        f"float32, D = {plan.d_model}, H = {plan.n_heads}. Time is the thread's own, memory what a run adds "
        "to the resident memory of its process. "
        "In a bundle, softmax attention is one fused operator.\n"
    )


def _picture(name: str, out: Path) -> str:
    return f"![{PICTURES[name]}]({name})\n" if (out / name).is_file() else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def complexity(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of stated costs and measured exponents, as in the table of Vaswani et al. 2017. A causal form has no row, because it
    costs the same as its encoder form.
    """
    rows = []
    for name, result in results.items():
        cost = EVERYTHING[name].cost
        if (row := cost.row) is None or EVERYTHING[name].capabilities.causal:
            continue
        reached = "never, however many," if result.layers_to_reach == 0 else str(result.layers_to_reach)
        path = f"{row.path}; measured {reached} at N = {plan.rank_length}"
        rows.append((row.name, cost.words, *exponents(result, plan), row.sequential, path, result.ended or ""))
    headings = ("layer", "time, stated", "exponent of that", "measured", "memory", "sequential steps", "layers to reach all", "stopped")
    return table(headings, rows)


def every_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of all mechanisms: exponents of time and memory, and both values at each mechanism's longest measured N."""
    rows = []
    for name, result in results.items():
        if result.points:
            last = result.points[-1]
            at_end = (f"{last.N:,}", f"{last.s * 1000:,.1f}", f"{last.peak_bytes / MiB:,.1f}")
            rows.append((f"`{name}`", EVERYTHING[name].cost.words, *exponents(result, plan), *at_end, result.ended or ""))
    return table(("mechanism", "time, stated", "exponent of that", "measured", "memory", "longest N", "there: ms", "MiB", "stopped"), rows)


def exponents(result: Result, plan: ComparisonPlan) -> list[str]:
    """Return the exponents with which the stated cost, the measured time and the measured memory grow with N."""
    lengths = [point.N for point in result.points]
    stated = [work(result.name, N, plan.d_model, plan.n_heads, longest=plan.longest) for N in lengths]
    measured = [point.s for point in result.points], [float(point.peak_bytes) for point in result.points]
    return [_short(growth.exponent(lengths, values)) for values in (stated, *measured)]


def width_growth(results: Results, plan: ComparisonPlan) -> str:
    """Return a table of how the cost grows with sizes other than N, such as the number of landmarks."""
    headings = ("mechanism", "time, stated", "what grows", "ms a run", "exponent stated, with projections", "measured")
    rows = []
    for name, result in results.items():
        if result.widths and (varied := EVERYTHING[name].examples.varied):
            runs = ", ".join(f"{s * 1000:,.1f} at {value}" for value, s in result.widths.items())
            rows.append((f"`{name}`", EVERYTHING[name].cost.words, varied[0], runs, *map(_short, width_exponents(result, plan, varied[0]))))
    return table(headings, rows)


def width_exponents(result: Result, plan: ComparisonPlan, option: str) -> tuple[float | None, float | None]:
    """Return the exponents with which the stated cost (including projections) and the measured time grow with the option."""
    N, values = plan.width_length, [*result.widths]
    projections = result.linear_weights * N if is_attention(result.name) else 0
    sizes = (N, plan.d_model, plan.n_heads)
    stated = [work(result.name, *sizes, longest=plan.longest, more={option: value}) + projections for value in values]
    return growth.exponent(values, stated, begin=0), growth.exponent(values, [*result.widths.values()], begin=0)


def _short(exponent: float | None) -> str:
    return "" if exponent is None else f"{exponent:.2f}"


def abilities(results: Results) -> str:
    flags = {"causal": "causal", "cross": "cross", "rotates": "rotary positions", "pairs": "pair mask and bias"}
    flags |= {"ordered": "knows order", "averages": "averages"}
    rows = []
    for name, result in results.items():
        can = EVERYTHING[name].capabilities
        marks = ["yes" if getattr(can, flag) else "" for flag in flags]
        rows.append((f"`{name}`", *marks, can.pads_to or "", _state(result), "" if result.error is None else f"{result.error:.1e}"))
    return table(("mechanism", *flags.values(), "pads N to", "state of a sequence", "from torch"), rows)


def _state(result: Result) -> str:
    """Describe the size of a sequence's state: constant, or bytes per token."""
    if not result.state_bytes:
        return ""
    (first, before), (last, after) = sorted(result.state_bytes.items())
    return f"{after / KiB:,.1f} KiB, however long" if before == after else f"{(after - before) / (last - first):,.0f} B a token"


class Panel(StrEnum):
    """The panels of a picture: one for each way in which mechanisms form attention weights."""

    pairs = "all pairs of tokens"
    pattern = "a pattern or a hash chooses pairs"
    sums = "sums over tokens"
    causal_pairs = "causal, with a cache"
    causal_sums = "causal, with a state of bounded size"
    none = "no attention"

    @classmethod
    def of(cls, name: str) -> "Panel":
        can = EVERYTHING[name].capabilities
        if can.causal:
            return cls.causal_sums if can.state == "constant" else cls.causal_pairs
        return cls[can.weights]


def draw_growth(results: Results, file: Path, *, what: str, value: Callable[[Point], float]) -> None:
    """Draw one panel per kind of mechanism. Both axes are logarithmic, so slopes are exponents. `what` labels the y axis."""
    kinds = [kind for kind in Panel if any(Panel.of(name) == kind and result.points for name, result in results.items())]
    if not kinds:
        return
    rows = -(-len(kinds) // 2)
    figure = Figure(figsize=(13, 4.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, kind in zip(panels, kinds, strict=False):
        own = [name for name in results if Panel.of(name) == kind]
        styles = {name: {"color": "0.75", "lw": 3, "zorder": 0} for name in SHOWN_EVERYWHERE if name in results and name not in own}
        styles |= {name: {"color": f"C{i % 10}", "ls": STYLES[i // 10 % len(STYLES)], "marker": "."} for i, name in enumerate(own)}
        for name, style in styles.items():
            points = [point for point in results[name].points if value(point) > 0]
            axes.plot([point.N for point in points], [value(point) for point in points], label=name, **style)
        axes.set(title=kind.value, xscale="log", yscale="log", xlabel="N, tokens", ylabel=what)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2, frameon=False)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.savefig(file)


def draw_ranks(results: Results, plan: ComparisonPlan, file: Path) -> None:
    """Draw the effective rank of every mechanism: one row each, with a dot for each width of a head."""
    shown = {name: result.ranks for name, result in results.items() if result.ranks}
    if not shown:
        return
    figure = Figure(figsize=(9, 0.5 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for i, width in enumerate(plan.rank_widths):
        axes.plot([found[width] for found in shown.values()], range(len(shown)), "o", ms=5, color=f"C{i}", label=f"D_k = {width}")
    axes.set_yticks(range(len(shown)), labels=list(shown))
    axes.invert_yaxis()
    axes.set(xlabel=f"effective rank of the N x N matrix, N = {plan.rank_length}", xlim=(0, plan.rank_length))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)
