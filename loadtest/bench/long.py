"""`attnserve bench-long`: an encoder of linear cost beside its teacher, on texts from the teacher's longest to many times that.

Both are bundles for texts of the same length, read by the bare runtime in a process each, one text at a time on all cores, in turns.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from export import contract
from loadtest.common import machine, report
from loadtest.common.report import Bar, Row
from loadtest.common.terminal import console, interruptible, progress, show
from loadtest.errors import LoadtestError
from loadtest.in_process import bare

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192)
TIMES = 4  # as many tokens a second as the teacher, at the longest
Rates = Mapping[int, Sequence[float]]  # tokens of a text -> tokens a second, by round


@app.command()
def bench_long(
    linear: Annotated[Path, typer.Option(help="Bundle of the encoder of linear cost.")] = Path("bundles/all-MiniLM-L6-v2-linear"),
    teacher: Annotated[Path, typer.Option(help="Bundle of its teacher, positions repeated up to the same length.")] = Path(
        "bundles/all-MiniLM-L6-v2-repeated"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="So long is one length read, again and again.")] = 3,
    out: Annotated[Path, typer.Option(help="Directory for the JSON and the picture of this run.")] = Path("out/bench-long"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
) -> None:
    """Measure tokens a second by length of the text. Ends with 1 when the bar is missed."""
    bundles = {"teacher": teacher, "linear": linear}
    lengths = lengths_of(bundles)
    about: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["attnserve", *sys.argv[1:]],
        **machine.describe(),
        "bundles": {name: contract.read_manifest(folder).fingerprint for name, folder in bundles.items()},
        "plan": {"rounds": rounds, "seconds": seconds, "lengths": lengths},
    }
    rates: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in bundles}
    with interruptible(), progress(rounds * len(bundles)) as begin:
        for number in range(1, rounds + 1):
            for name, folder in bundles.items():
                begin(f"round {number}/{rounds}: {name}")
                timings = bare.measure(folder, [(1, N) for N in lengths], threads=machine.cpus(), seconds=seconds, spin=False)
                for (_, N), timing in timings.items():
                    rates[name][N].append(timing["texts_per_s"] * N)
    rows = judged(rates["linear"], rates["teacher"])
    file = out / f"{about['date'].replace(':', '-')}.json"
    report.write_json(file, rows, about, [{"encoder": name, "tokens_per_s": found} for name, found in rates.items()])
    plot(rates, file.with_suffix(".png"))
    show(rows, f"linear beside its teacher, {about['cpus']} cores, {about['cpu']}, {about['date']}", markdown=markdown)
    console.print(f"every figure: {file}, and a picture beside it", soft_wrap=True)
    if any(row.verdict is report.Verdict.failed for row in rows):
        raise typer.Exit(1)


def lengths_of(bundles: Mapping[str, Path]) -> list[int]:
    """Those that all bundles read. Raises LoadtestError where that is none, ContractError for a bundle that is not whole."""
    most = min(contract.verify(folder).limits.max_tokens for folder in bundles.values())
    lengths = [N for N in LENGTHS if most >= N]
    if not lengths:
        raise LoadtestError(f"the bundles read texts of up to {most} tokens, and {LENGTHS[0]} is the least length; export longer ones")
    return lengths


def judged(linear: Rates, teacher: Rates) -> list[Row]:
    """A row a length, the bar at the longest."""
    longest = max(linear)
    return [
        Row(
            work=f"one text of {N:,} tokens",
            unit="tokens/s",
            figures=tuple(figures),
            references=tuple(teacher[N]),
            bar=Bar(reference="the teacher", at_least=TIMES) if longest == N else None,
        )
        for N, figures in linear.items()
    ]


def plot(rates: Mapping[str, Rates], file: Path) -> None:
    """Tokens a second against the length, medians of the rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, by_length in rates.items():
        axes.plot(list(by_length), [statistics.median(figures) for figures in by_length.values()], marker="o", label=name)
    axes.set(xlabel="tokens of a text", ylabel="tokens a second", xscale="log", ylim=(0, None))
    axes.set_xticks(list(LENGTHS), [f"{N:,}" for N in LENGTHS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=130, format="png")


if __name__ == "__main__":
    app(prog_name="attnserve bench-long")
