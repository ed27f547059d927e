"""`attnserve bench-long`: compares an encoder of linear cost with the softmax encoder that it was distilled from, called its teacher.

Lengths range from the longest text of the teacher to many times that length; for the longer ones, the teacher's position embeddings are
repeated. ONNX Runtime runs each bundle in its own process, one text at a time on all cores, in the graph that a service would use: the
linear encoder may have a graph of its own for short texts.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from export import contract
from loadtest.bench.runner import Contestant, Figure, Markdown, Measurement, Measurements, Out, Rounds, Seconds, compare, finish, run
from loadtest.common import machine
from loadtest.common.report import Bar, ReportRow
from loadtest.errors import LoadtestError
from loadtest.in_process import bare
from service.terminal import command_app

app = command_app()

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192)
TIMES = 4.5  # required at the longest length: tokens/s of the linear encoder, as a multiple of the teacher's
# Required at the shortest length, which is read by the teacher's own attention: no slower, up to the spread of the rounds.
NO_SLOWER = 0.97
LINEAR, TEACHER = "linear", "teacher"


@app.command()
def bench_long(
    linear: Annotated[Path, typer.Option(help="Bundle of the encoder of linear cost.")] = Path("bundles/all-MiniLM-L6-v2-linear"),
    teacher: Annotated[Path, typer.Option(help="Bundle of its teacher, positions repeated up to the same length.")] = Path(
        "bundles/all-MiniLM-L6-v2-repeated"
    ),
    rounds: Rounds = 3,
    seconds: Seconds = 3,
    out: Out = Path("out/bench-long"),
    markdown: Markdown = False,
) -> None:
    """Measure tokens per second by text length. Exits with 1 if the required ratio is missed."""
    bundles, measured = {TEACHER: teacher, LINEAR: linear}, Measurements()
    lengths = lengths_of(bundles)

    def measure(name: str, _: object) -> None:
        shapes = [(1, N) for N in lengths]
        for (_, N), timing in bare.measure(bundles[name], shapes, threads=machine.cpus(), seconds=seconds, spin=False).items():
            measured.note(work_of(N), name, tokens_per_s=timing["texts_per_s"] * N)

    contestants = [Contestant(name, [Measurement("all lengths", partial(measure, name))]) for name in bundles]
    about = run(contestants, rounds, measured, list(bundles.values()), {"seconds": seconds, "lengths": lengths})
    made = rows(measured, lengths)
    subject = "linear beside its teacher"
    finish(made, measured, about, subject=subject, out=out, markdown=markdown, draw=lambda file, _: plot(made, lengths, file))


def lengths_of(bundles: Mapping[str, Path]) -> list[int]:
    """Return the lengths in tokens that all bundles accept. Raises LoadtestError if there are none, ContractError for a damaged bundle."""
    most = min(contract.verify(folder).limits.max_tokens for folder in bundles.values())
    lengths = [N for N in LENGTHS if most >= N]
    if not lengths:
        raise LoadtestError(
            f"the bundles accept up to {most} tokens, but the shortest measured length is {LENGTHS[0]}; export for longer texts"
        )
    return lengths


def work_of(length: int) -> str:
    return f"one text of {length:,} tokens"


def rows(measured: Measurements, lengths: list[int]) -> list[ReportRow]:
    """Return a row for each length. A ratio is required for the first of LENGTHS and for the longest length."""
    bars = {LENGTHS[0]: Bar(reference="the teacher", at_least=NO_SLOWER), max(lengths): Bar(reference="the teacher", at_least=TIMES)}
    ours, teachers = ({N: Figure(work_of(N), name, "tokens_per_s") for N in lengths} for name in (LINEAR, TEACHER))
    return [compare(measured, work_of(N), "tokens/s", ours[N], teachers[N], bars.get(N)) for N in lengths]


def plot(made: list[ReportRow], lengths: list[int], file: Path) -> None:
    """Plot tokens per second by length, as medians of the rounds, into a PNG next to the JSON `file`."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    for name, values in ((TEACHER, [row.references for row in made]), (LINEAR, [row.figures for row in made])):
        axes.plot(lengths, [statistics.median(each) for each in values], marker="o", label=name)
    axes.set(xlabel="tokens of a text", ylabel="tokens a second", xscale="log", ylim=(0, None))
    axes.set_xticks(list(LENGTHS), [f"{N:,}" for N in LENGTHS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.savefig(file.with_suffix(".png"), dpi=130, format="png")
