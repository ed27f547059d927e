"""`attnserve bench-faults`: what clients see of a cluster that is changed and loses a node, under Poisson arrivals; see README.md."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from loadtest import machine
from loadtest.cluster import Cluster, running
from loadtest.errors import LoadtestError
from loadtest.load import figures, locust_run, models, plots, samples
from loadtest.load.command import cell, chosen, guess
from loadtest.load.figures import ALL, StageFigures
from loadtest.load.plan import Plan, Stage
from loadtest.load.samples import Sample
from loadtest.load.shapes import DRAIN, WARM_UP
from loadtest.terminal import console, interruptible, progress

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

POOLS = ("gateway", "encoder", "generator")
STAYS, DIES = "one", "two"  # the workers; clients come in through the first
# What a client may be told of a stream that a dead process had begun; see deploy/faults.md.
_CUT = ("is gone", "without [DONE]", "incomplete")
_LOSS = "node killed"


def _scaled(cluster: Cluster, number: int) -> None:
    cluster.deploy(**{pool: {"num_replicas": number} for pool in POOLS})
    cluster.until(lambda: cluster.settled() and all(len(cluster.replicas(pool)) == number for pool in POOLS), f"there are {number} of each")


def _updated(cluster: Cluster) -> None:
    """A setting that is read at start: every replica is replaced."""

    def names() -> set[str]:
        return {replica["replica_id"] for pool in POOLS for replica in cluster.replicas(pool)}

    before = names()
    cluster.deploy(args={"bulk_delay_s": 1.5})
    cluster.until(lambda: cluster.settled() and not names() & before, "every replica is a new one", 300)


def _joined(cluster: Cluster) -> None:
    cluster.start_worker(DIES, cpus=len(POOLS))
    cluster.until(lambda: cluster.settled() and cluster.ready(STAYS, DIES), "the service is whole again")


# Stages, each with what is done as it begins. The cluster has two of each pool, one on every worker, before and after each pair of them.
EVENTS: dict[str, Callable[[Cluster], None]] = {
    "quiet": lambda cluster: None,
    "rolling update": _updated,
    "scale down": lambda cluster: _scaled(cluster, 1),
    "scale up": lambda cluster: _scaled(cluster, 2),
    _LOSS: lambda cluster: cluster.kill(DIES),
    "node joins": _joined,
}


@app.command()
def bench_faults(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    knee: Annotated[float | None, typer.Option(min=0.1, help="Requests/s.", show_default="guessed from a burst")] = None,
    level: Annotated[float, typer.Option(min=0.01, help="Load, as a share of the knee.")] = 0.5,
    seconds: Annotated[float, typer.Option(min=10, help="Length of each stage; an event must be over by its end.")] = 90,
    mix: Annotated[str | None, typer.Option(help="KIND=SHARE,... as of `attnserve load`.", show_default="all but hostile")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 64,
    seed: Annotated[int, typer.Option(help="Of texts, arrivals and choices.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory; the run gets one of its own there.")] = Path("out/faults"),
) -> None:
    """Start a cluster of a head and two workers here, load it, and meanwhile update, scale and kill. Ends with 1 when a request fails that
    the dead node had not accepted."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    folder = (out / date.replace(":", "-")).resolve()
    flags = ("--encoders", "2", "--generators", "2", "--threads", "1", "--set", "gateways=2")
    with interruptible(), running([encoder, decoder], *flags, workers=(STAYS, DIES), cpus=len(POOLS)) as cluster:
        url = cluster.url(STAYS)
        tasks = models.tasks(url, models.names(url))
        stages = (Stage(name=WARM_UP, seconds=10, level=level), *(Stage(name=name, seconds=seconds, level=level) for name in EVENTS), DRAIN)
        shares = chosen(mix, tasks)
        if mix is None:
            del shares["hostile"]
        plan = Plan(
            url=url, out=folder, seed=seed, open_loop=True, rate=knee or 1, mix=shares, models=tasks, stages=stages, max_tokens=max_tokens
        )
        if not knee:
            plan = plan.model_copy(update={"rate": guess(plan, 0)})
        console.print(f"knee {plan.rate:,.1f} requests/s, arrivals {level * plan.rate:,.1f}/s", highlight=False)
        took = played(plan, cluster)
    found, begun = samples.read(folder)
    told = [seen(stage, found, took.get(stage.name)) for stage in figures.by_stage(found, begun) if stage.name != WARM_UP]
    about = {"date": date, "command": ["attnserve", *sys.argv[1:]], **machine.describe(), "knee_per_s": plan.rate, "level": level}
    title = f"{level:g} of the knee ({plan.rate:,.1f}/s), {about['cpus']} cores, {about['cpu']}, {date}"
    (folder / "faults.json").write_text(json.dumps({**about, "stages": [each.as_json() for each in told]}, indent=1) + "\n")
    plots.percentiles_over_time(found, begun, folder / "percentiles.png", title)
    show(told, title)
    console.print(f"everything: {folder}", soft_wrap=True)
    if any(each.failed for each in told):
        raise typer.Exit(1)


def played(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Run it and do what each stage is named for as it begins: seconds until that was through. LoadtestError for what was not in time."""
    took: dict[str, float] = {}
    wrong: list[str] = []
    threads: list[threading.Thread] = []
    marker = plan.out / samples.STAGES

    def do(name: str) -> None:
        started = time.monotonic()
        try:
            EVENTS[name](cluster)
        except Exception as error:  # told where the run has ended
            wrong.append(f"{name}: {error}")
        took[name] = time.monotonic() - started

    with progress(len(plan.stages) + 1) as advance:
        advance("Locust starts")
        shown = 0

        def tick() -> None:
            nonlocal shown
            lines = marker.read_text().splitlines() if marker.exists() else []
            for name in [json.loads(line)["name"] for line in lines[shown:]]:
                advance(name)
                if name in EVENTS:
                    if any(thread.is_alive() for thread in threads):
                        wrong.append(f"{name} began before what came before it was through: give --seconds more")
                    threads.append(threading.Thread(target=do, args=(name,)))
                    threads[-1].start()
            shown = len(lines)

        locust_run.run(plan, tick=tick)
    for thread in threads:
        thread.join()
    if wrong:
        raise LoadtestError("; ".join(wrong))
    return took


class Seen(NamedTuple):
    """A stage as its clients saw it. `cut` are streams that a dead process had begun, told of in a stated form; `failed` are the rest."""

    stage: StageFigures
    took_s: float
    cut: int
    failed: int
    problems: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {**self.stage.model_dump(), "took_s": self.took_s, "cut": self.cut, "failed": self.failed, "problems": self.problems}


def seen(stage: StageFigures, found: Sequence[Sample], took_s: float | None) -> Seen:
    """Of the requests that were due in a stage, its first second included."""
    bad = [sample for sample in found if stage.begin_s - 1 <= sample.due_s < stage.end_s - 1 and not sample.good]
    cut = [
        sample for sample in bad if stage.name == _LOSS and sample.first_ms is not None and any(words in sample.problem for words in _CUT)
    ]
    problems = Counter(f"{sample.kind} {sample.status}: {sample.problem[:120]}" for sample in bad)
    return Seen(stage, took_s or 0.0, len(cut), len(bad) - len(cut), dict(problems))


def show(told: Sequence[Seen], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("stage", "through after s", "arrivals", "answered/s", "p50 ms", "p95 ms", "p99 ms", "longest ms", "cut", "failed"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for each in told:
        of = each.stage.kinds[ALL]
        numbers = (of.arrivals, of.answered_per_s, of.p50_ms, of.p95_ms, of.p99_ms, of.max_ms, each.cut, each.failed)
        table.add_row(each.stage.name, f"{each.took_s:.1f}", *map(cell, numbers))
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=160)).print(table)
    for each in told:
        for problem, count in each.problems.items():
            terminal.print(f"{each.stage.name}: {count} x {problem}", highlight=False)


if __name__ == "__main__":
    app(prog_name="attnserve bench-faults")
