"""`attnserve bench-faults`: sends requests to a cluster while it is updated, scaled and loses a node; see loadtest/README.md."""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from loadtest.common import machine
from loadtest.common.terminal import interruptible, progress, stdout
from loadtest.errors import LoadtestError
from loadtest.faults.cluster import START_S, Cluster, running
from loadtest.load import figures, locust_run, models, plots, samples
from loadtest.load.command import BURST, cell, chosen, guess
from loadtest.load.figures import ALL, StageFigures
from loadtest.load.plan import DRAIN, LoadPlan, Stage
from loadtest.load.samples import Sample, StageStart
from loadtest.load.shapes import WARM_UP
from service.terminal import command_app, console

app = command_app()

POOLS = ("gateway", "encoder", "generator")
STAYS, DIES = "one", "two"  # the two workers: clients connect to the first, the second is killed
# A stream whose process has died ends with an error that contains one of these texts; see deploy/faults.md.
_CUT = ("is gone", "without [DONE]", "incomplete")
_LOSS, _UPDATE = "node killed", "rolling update"


def _scaled(cluster: Cluster, number: int) -> None:
    cluster.deploy(**{pool: {"num_replicas": number} for pool in POOLS})

    def there() -> bool:
        return cluster.settled() and all(len(cluster.replicas(pool)) == number for pool in POOLS)

    cluster.until(there, f"there are {number} of each", START_S)


def _updated(cluster: Cluster) -> None:
    """Change a setting that replicas read only when they start, so that Serve replaces every replica, and wait until it has done so."""

    def names() -> set[str]:
        return {replica["replica_id"] for pool in POOLS for replica in cluster.replicas(pool)}

    before = names()
    cluster.deploy(args={"bulk_delay_s": 1.5})
    cluster.until(lambda: cluster.settled() and not names() & before, "every replica is a new one", START_S)


def _joined(cluster: Cluster) -> None:
    cluster.start_worker(DIES, cpus=len(POOLS))
    cluster.until(lambda: cluster.settled() and cluster.ready(STAYS, DIES), "the service is whole again", START_S)


# Stage -> change of the cluster when it begins. Stages come in pairs: after each pair every pool has two replicas again, one per worker.
EVENTS: dict[str, Callable[[Cluster], None]] = {
    "quiet": lambda cluster: None,
    _UPDATE: _updated,
    "scale down": lambda cluster: _scaled(cluster, 1),
    "scale up": lambda cluster: _scaled(cluster, 2),
    _LOSS: lambda cluster: cluster.kill(DIES),
    "node joins": _joined,
}


@app.command()
def bench_faults(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    knee: Annotated[
        float | None, typer.Option(min=0.1, help="Requests/s; a ramp of `attnserve load` finds it.", show_default="guessed from a burst")
    ] = None,
    level: Annotated[float, typer.Option(min=0.01, help="Load, as a share of the knee.")] = 0.5,
    seconds: Annotated[
        float, typer.Option(min=10, help="Length of each stage, the update's is twice that; an event must be over by its end.")
    ] = 90,
    mix: Annotated[str | None, typer.Option(help="KIND=SHARE,... as of `attnserve load`.", show_default="all but hostile")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 64,
    seed: Annotated[int, typer.Option(help="Of texts, arrivals and choices.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory; the run gets one of its own there.")] = Path("out/faults"),
) -> None:
    """Start a cluster of a head and two workers on this machine, and update, scale and kill it under load. Exits with 1 if a request fails
    that the killed node had not accepted."""
    about = machine.about_run()
    date = about["date"]
    folder = (out / date.replace(":", "-")).resolve()
    flags = ("--encoders", "2", "--generators", "2", "--threads", "1", "--set", "gateways=2")
    with interruptible(), running([encoder, decoder], *flags, workers=(STAYS, DIES), cpus=len(POOLS)) as cluster:
        url = cluster.url(STAYS)
        tasks = models.tasks(url, models.names(url))
        # The stage of the rolling update is longer, because Serve replaces the replicas of each pool one after the other.
        lengths = {WARM_UP: 10.0, **dict.fromkeys(EVENTS, seconds), _UPDATE: 2 * seconds}
        stages = (*(Stage(name=name, seconds=length, level=level) for name, length in lengths.items()), DRAIN)
        shares = chosen(mix, tasks)
        if mix is None:
            del shares["hostile"]
        plan = LoadPlan(
            url=url, out=folder, seed=seed, open_loop=True, rate=knee or 1, mix=shares, models=tasks, stages=stages, max_tokens=max_tokens
        )
        if not knee:
            plan = plan.model_copy(update={"rate": guess(plan, 0)})
        origin = "given" if knee else f"guessed from a burst of {BURST}"
        console.print(f"knee {plan.rate:,.1f} requests/s ({origin}), arrivals {level * plan.rate:,.1f}/s", highlight=False)
        took: dict[str, float] = {}
        wrong: ChangeFailed | None = None
        try:
            run_with_changes(plan, cluster, took)
        except ChangeFailed as error:
            wrong = error
    found, begun = samples.read(folder)
    begun = with_drain(found, begun)
    told = stages_of(found, begun, took)
    about |= {
        "knee_per_s": plan.rate,
        "knee": origin,
        "level": level,
        "stopped": wrong and str(wrong),
        "stages": [each.as_json() for each in told],
    }
    (folder / "faults.json").write_text(json.dumps(about, indent=1) + "\n")
    title = f"{level:g} of the knee ({plan.rate:,.1f}/s, {origin}), {about['cpus']} cores, {about['cpu']}, {date}"
    plots.percentiles_over_time(found, begun, folder / "percentiles.png", title)
    show(told, title)
    console.print(f"everything: {folder}", soft_wrap=True)
    if wrong:
        raise wrong
    if any(each.failed for each in told):
        raise typer.Exit(1)


class ChangeFailed(LoadtestError):
    """A change of the cluster failed, or was not complete when the next change began."""


def run_with_changes(plan: LoadPlan, cluster: Cluster, took: dict[str, float]) -> None:
    """Run the plan, and make the change of each stage when the stage begins. The seconds that a change took are written into `took`. Raises
    ChangeFailed as soon as a change fails."""
    wrong: list[str] = []
    threads: list[threading.Thread] = []
    marker = plan.out / samples.STAGES

    def do(name: str) -> None:
        started = time.monotonic()
        try:
            EVENTS[name](cluster)
        except Exception as error:  # `tick` raises it again in the main thread
            wrong.append(f"{name}: {error}")
        else:
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
                        raise ChangeFailed(f"{name} began before the previous change was complete: give a larger --seconds")
                    # A daemon thread, because it may wait for the cluster until the cluster is stopped.
                    threads.append(threading.Thread(target=do, args=(name,), daemon=True))
                    threads[-1].start()
            shown = len(lines)
            if wrong:
                raise ChangeFailed(wrong[0])

        locust_run.run(plan, tick=tick)
        for thread in threads:
            thread.join(2 * START_S)
        tick()


class StageOutcome(NamedTuple):
    """Counts of a stage's requests. `cut`: streams that ended with a documented error because their process died. `refused`: answers with
    429. `failed`: all other errors. `took_s`: seconds until the change was complete, None if it was never complete."""

    stage: StageFigures
    took_s: float | None
    refused: int
    cut: int
    failed: int
    problems: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {**self.stage.model_dump(), **{name: value for name, value in self._asdict().items() if name != "stage"}}


def with_drain(found: Sequence[Sample], begun: Sequence[StageStart]) -> list[StageStart]:
    """Return the stages of a load test. If it was stopped early, a drain stage is added at its end."""
    if begun[-1].name == DRAIN.name:
        return list(begun)
    end_s = max(begun[-1].begin_s + 1, *(sample.done_s for sample in found))
    return [*begun, StageStart(DRAIN.name, DRAIN.level, 0, end_s)]


def stages_of(found: Sequence[Sample], begun: Sequence[StageStart], took: Mapping[str, float]) -> list[StageOutcome]:
    """Return all stages except the warm-up. A request that failed counts in the stage in which it ended, because the cause of its failure
    may have occurred after it began. Requests that fail in the drain count in the last stage."""
    ends = [*(stage.begin_s for stage in begun[1:-1]), math.inf]
    return [
        outcome_of(stage, [sample for sample in found if first.begin_s <= sample.done_s < end_s], took.get(stage.name))
        for stage, first, end_s in zip(figures.by_stage(found, begun), begun, ends, strict=False)
        if stage.name != WARM_UP
    ]


def outcome_of(stage: StageFigures, over: Sequence[Sample], took_s: float | None) -> StageOutcome:
    """Return the figures of a stage and the counts of `over`, the requests that ended in it."""
    bad = [sample for sample in over if not sample.good]
    cut = [
        sample for sample in bad if stage.name == _LOSS and sample.first_ms is not None and any(words in sample.problem for words in _CUT)
    ]
    refused = sum(sample.status == 429 for sample in bad)
    problems = Counter(f"{sample.kind} {sample.status}: {sample.problem[:120]}" for sample in bad)
    return StageOutcome(stage, took_s, refused, len(cut), len(bad) - refused - len(cut), dict(problems))


def show(told: Sequence[StageOutcome], title: str) -> None:
    table = Table(title=title, title_justify="left")
    counts = ("refused", "cut", "failed")
    for heading in ("stage", "through after s", "arrivals", "answered/s", "p50 ms", "p95 ms", "p99 ms", "longest ms", *counts):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for each in told:
        of = each.stage.kinds[ALL]
        numbers = (of.arrivals, of.answered_per_s, of.p50_ms, of.p95_ms, of.p99_ms, of.max_ms, each.refused, each.cut, each.failed)
        table.add_row(each.stage.name, "" if each.took_s is None else f"{each.took_s:.1f}", *map(cell, numbers))
    terminal = stdout(width=160)
    terminal.print(table)
    for each in told:
        for problem, count in each.problems.items():
            terminal.print(f"{each.stage.name}: {count} x {problem}", highlight=False)
