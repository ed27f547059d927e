"""`attnserve load`: loads a running service, and reports figures and verdicts; see loadtest/README.md."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from loadtest.common import machine
from loadtest.common.report import Verdict, amount
from loadtest.common.terminal import interruptible, progress, stdout
from loadtest.errors import LoadtestError
from loadtest.load import figures, flatness, knee, locust_run, models, pass_marks, samples, watch
from loadtest.load.figures import ALL, StageFigures
from loadtest.load.kinds import KINDS
from loadtest.load.pass_marks import Judged
from loadtest.load.plan import DRAIN, LoadPlan, Stage, stages
from loadtest.load.shapes import SECONDS, WARM_UP, Shape
from service.terminal import command_app, console

app = command_app()

BURST = 128  # requests sent at once to guess the knee
GUESS_SHARE = 0.8  # the guessed knee is this share of the burst's throughput, because real arrivals are uneven
SETTLING = 0.25  # share of the stage `crowd`, at its beginning, during which the connections of the crowd are opened
REST_S = 60.0  # longest wait in seconds, after the load, for connections to close: the proxy keeps some open for 30 s
ENOUGH = 200  # fewest requests of a kind for a p99; with 30 requests, the p99 would be the slowest one


@app.command()
def load(
    url: Annotated[str, typer.Option(help="The running service.")] = "http://127.0.0.1:8000",
    shape: Annotated[Shape, typer.Option(help="How the load goes in time.")] = Shape.steady,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Length of the run.", show_default="by shape")] = None,
    knee_: Annotated[
        float | None,
        typer.Option("--knee", min=0.1, help="Requests/s that levels are multiples of.", show_default="guessed from a burst"),
    ] = None,
    closed: Annotated[int | None, typer.Option("--closed", min=1, help="Closed loop: so many clients are level 1.")] = None,
    mix: Annotated[str | None, typer.Option(help=f"KIND=SHARE,...; kinds: {', '.join(KINDS)}.", show_default="all that it answers")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model to ask; may be given several times.", show_default="all")] = None,
    words: Annotated[int | None, typer.Option(min=1, help="Words of every text to embed.", show_default="a distribution")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a stream.")] = 128,
    idle: Annotated[int, typer.Option(min=0, help="Shape crowd: idle connections.")] = 1000,
    slow: Annotated[int, typer.Option(min=0, help="Shape crowd: slow readers.")] = 20,
    workers: Annotated[int, typer.Option(min=0, help="Locust workers beside a master; 0: one process.")] = 0,
    pid: Annotated[int | None, typer.Option(help="First process of the service.", show_default="found by the port")] = None,
    seed: Annotated[int, typer.Option(help="Of texts, arrivals and choices.")] = 0,
    marks_: Annotated[Path, typer.Option("--marks", help="Pass marks.")] = pass_marks.FILE,
    out: Annotated[Path, typer.Option(help="Directory; the run gets one of its own there.")] = Path("out/load"),
) -> None:
    """Load a running service and compare it with the pass criteria of the shape. Exits with 1 if a criterion is missed or not measured."""
    if closed and knee_:
        raise typer.BadParameter("--knee is the rate of an open loop, but --closed is a closed loop: give only one of them")
    wanted, key = pass_marks.load(marks_, shape), os.environ.get("LOADTEST_API_KEY", "")
    url = url.rstrip("/")
    tasks = models.tasks(url, model or models.names(url, key), key)
    seconds = (minutes * 60) if minutes else SECONDS[shape]
    about = {**machine.about_run(), "shape": shape.value}
    date = about["date"]
    plan = LoadPlan(
        url=url,
        out=(out / f"{date.replace(':', '-')}-{shape}").resolve(),
        seed=seed,
        open_loop=closed is None,
        rate=closed or knee_ or 1,
        mix=chosen(mix, tasks),
        models=tasks,
        stages=stages(shape, seconds, idle=idle, slow=slow),
        words=words,
        max_tokens=max_tokens,
    )
    root = pid or watch.service_pid(url)
    if root is None:
        console.print("[yellow]the service's processes are not on this machine or not ours to see: only its /metrics are watched[/yellow]")
    with interruptible():
        if plan.open_loop and not knee_:
            plan = plan.model_copy(update={"rate": guess(plan, workers)})
            console.print(f"a burst of {BURST} requests says that the knee is about {plan.rate:,.1f} requests/s", highlight=False)
        observations = run_plan(plan, workers, root, key)
    told = LoadRun(plan, shape, observations)
    judged = pass_marks.judge(wanted, told.stages, told.of_run)
    told.write(about, judged)
    show(told, judged, f"{shape}, {', '.join(sorted(set(tasks.values())))}, {about['cpus']} cores, {about['cpu']}, {date}")
    for stage in told.stages:
        if stage.late_ms:
            warning = f"{stage.name}: the generator itself was late (p99 {stage.late_ms:,.0f} ms): give it cores, or --workers"
            console.print(f"[yellow]{warning}[/yellow]")
    for each in judged:
        if each.verdict == Verdict.not_judged:
            why = pass_marks.NOT_SEEN[each.mark.figure]
            console.print(f"[bold red]not judged[/bold red]: {each.mark.figure}: {why}", highlight=False, soft_wrap=True)
    console.print(f"everything: {plan.out}", soft_wrap=True)
    if any(each.verdict in (Verdict.failed, Verdict.not_judged) for each in judged):
        raise typer.Exit(1)


def chosen(mix: str | None, tasks: dict[str, str]) -> dict[str, int]:
    """Return the kinds to send with their shares; by default all that the service can answer. Raises typer.BadParameter for other kinds."""
    able = {name: kind.share for name, kind in KINDS.items() if not kind.task or kind.task in tasks}
    if mix is None:
        return able
    found = {}
    for word in mix.split(","):
        kind, _, share = word.strip().partition("=")
        if kind not in KINDS or not (share or "1").isdecimal() or int(share or "1") < 1:
            raise typer.BadParameter(f"{word!r} is not KIND=SHARE; kinds: {', '.join(KINDS)}", param_hint="--mix")
        if kind not in able:
            raise typer.BadParameter(f"no model of this service can answer {kind}; it can answer: {', '.join(able)}", param_hint="--mix")
        found[kind] = int(share or "1")
    return found


def guess(plan: LoadPlan, workers: int) -> float:
    """Estimate the requests/s at the knee from the time in which the service answers BURST requests that are sent at once."""
    burst = (Stage(name="burst", seconds=1, level=1), DRAIN)
    trial = plan.model_copy(update={"open_loop": False, "rate": BURST, "turns": 1, "stages": burst, "out": plan.out / "burst"})
    locust_run.run(trial, workers=workers)
    found, begun = samples.read(trial.out)
    done = sorted(sample.done_s for sample in found if sample.good)
    if len(done) < 2:
        raise LoadtestError(f"no request was answered: see {trial.out / samples.SAMPLES} for the reasons, or give --knee")
    most = round(len(done) * 0.9)  # the last tenth is not counted, because it leaves cores idle
    return GUESS_SHARE * most / (done[most - 1] - begun[0].begin_s)


def run_plan(plan: LoadPlan, workers: int, root: int | None, key: str) -> list[watch.Observation]:
    """Run the plan with a progress bar. Returns observations of the service during the run, and a last one when all connections are
    closed."""
    interval_s = max(sum(stage.seconds for stage in plan.stages) / 600, 1.0)
    begun = plan.out / samples.STAGES
    with watch.observing(root, plan.url, interval_s, key) as observations, progress(len(plan.stages) + 1) as advance:
        shown = 0
        advance("Locust starts")

        def tick() -> None:
            nonlocal shown
            names = [json.loads(line)["name"] for line in begun.read_text().splitlines()] if begun.exists() else []
            for name in names[shown:]:
                advance(name)
            shown = max(shown, len(names))

        locust_run.run(plan, workers=workers, tick=tick)
    return [*observations, rested(observations[0], root, plan.url, key)]


def rested(before: watch.Observation, root: int | None, url: str, key: str) -> watch.Observation:
    """Wait until the service has closed the clients' connections (a proxy closes them after some seconds), at most `REST_S` seconds. Return
    a last observation."""
    fds = {process.pid: process.fds for process in before.processes}
    until = time.monotonic() + REST_S
    while True:
        time.sleep(1.0)
        found = watch.observe(root, url, key)
        if time.monotonic() > until or all(flatness.at_rest(fds.get(each.pid, each.fds), each.fds) for each in found.processes):
            return found


class LoadRun:
    """The results of a load test: the figures of its stages, the knee (of a ramp), and the figures of the whole load test."""

    def __init__(self, plan: LoadPlan, shape: Shape, observations: list[watch.Observation]) -> None:
        self.plan, self.shape, self.observations = plan, shape, observations
        self.samples, self.begun = samples.read(plan.out)
        self.stages = [
            stage.model_copy(update={"cores": watch.cores(observations, stage.begin_s, stage.end_s)})
            for stage in figures.by_stage(self.samples, self.begun)
        ]
        self.knee = knee.knee([stage for stage in self.stages if stage.name != WARM_UP]) if shape == Shape.ramp else None
        self.flatness = self._flatness()
        self.of_run = self._of_run()

    def _stage(self, name: str) -> StageFigures:
        return next(stage for stage in self.stages if stage.name == name)

    def _flatness(self) -> list[flatness.Flatness]:
        watched = {Shape.soak: "soak", Shape.crowd: "crowd"}.get(self.shape)
        if watched is None:
            return []
        stage = self._stage(watched)
        settled_s = stage.begin_s + (stage.end_s - stage.begin_s) * (SETTLING if self.shape == Shape.crowd else 0)
        return flatness.judge(self.observations, settled_s, stage.end_s)

    def _of_run(self) -> dict[str, float | None]:
        made: dict[str, float | None] = {"unanswered": float(sum(not sample.status for sample in self.samples))}
        if self.shape == Shape.ramp:
            late = self.knee is not None and self.knee.late_ms is not None
            made["knee_reached"] = None if late else float(self.knee is not None and self.knee.reached)
        if self.shape in (Shape.overload, Shape.spike):
            usual, after = ("knee", "recovery") if self.shape == Shape.overload else ("before", "after")
            begin_s = next(stage.begin_s for stage in self.begun if stage.name == after)
            normal_ms = self._stage(usual).all.p95_ms
            made["recovery_s"] = knee.recovery_s(self.samples, begin_s, self._stage(after).end_s, normal_ms) if normal_ms else None
        if self.shape == Shape.overload:
            made["p99_over_knee"] = slower(self._stage("overload"), self._stage("knee"))
        if self.shape == Shape.crowd:
            crowd, alone = self._stage("crowd"), self._stage("alone")
            made["p99_over_alone"] = slower(crowd, alone)
            with_crowd, without = resident_mib(self.observations, crowd), resident_mib(self.observations, alone)
            made["crowd_mib"] = with_crowd - without if with_crowd and without else None
        if self.shape in (Shape.soak, Shape.crowd):
            made["not_flat"], made["not_at_rest"] = flatness.not_flat(self.flatness), flatness.not_at_rest(self.flatness)
        return made

    def write(self, about: dict[str, Any], judged: list[Judged]) -> None:
        """Write `run.json`, which has everything except samples (in `samples.csv`), and write the observations to `observations.jsonl`."""
        found = self.knee
        content = {
            **about,
            "plan": self.plan.model_dump(mode="json"),
            "stages": [stage.model_dump() for stage in self.stages],
            "knee": found and {"rate": found.rate, "stage": found.stage.name, "reached": found.reached, "late_ms": found.late_ms},
            "run": self.of_run,
            "flatness": [each._asdict() for each in self.flatness],
            "marks": [{**each.mark.model_dump(exclude_defaults=True), "value": each.figure, "verdict": each.verdict} for each in judged],
        }
        (self.plan.out / "run.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        with (self.plan.out / "observations.jsonl").open("w") as file:
            for seen in self.observations:
                file.write(json.dumps({**seen._asdict(), "processes": [process._asdict() for process in seen.processes]}) + "\n")


def slower(now: StageFigures, before: StageFigures) -> float | None:
    """Return the p99 latency in the stage `now` divided by that in the stage `before`, for the kind of client with the largest ratio. Kinds
    with fewer than ENOUGH requests are left out; if none remains, the p99 of all kinds together is used. None if no p99 was measured."""
    many = {
        ALL,
        *(kind for kind, found in now.kinds.items() if kind in before.kinds and min(found.arrivals, before.kinds[kind].arrivals) >= ENOUGH),
    } - {"hostile"}
    kinds = many - {ALL} or many
    pairs = [(now.kinds[kind].p99_ms, before.kinds[kind].p99_ms) for kind in kinds]
    return max((a / b for a, b in pairs if a is not None and b), default=None)


def resident_mib(observations: Sequence[watch.Observation], stage: StageFigures) -> float | None:
    """Return the largest resident memory of the service in a stage in MiB, summed over its processes. None if no process was observed."""
    sizes = [sum(process.rss_bytes for process in seen.processes) for seen in observations if stage.begin_s <= seen.at_s <= stage.end_s]
    most: int = max(sizes, default=0)
    return most / flatness.MiB if most else None


COLUMNS = (
    *("arrivals", "offered_per_s", "answered_per_s", "tokens_per_s", "p50_ms", "p95_ms", "p99_ms", "first_p99_ms", "between_p50_ms"),
    *("refused_share", "error_share", "late_p99_ms"),
)


def show(run: LoadRun, judged: list[Judged], title: str) -> None:
    """Print three tables: the figures of each stage and kind of client, the growth of memory and other series, and the pass criteria."""
    terminal = stdout(width=200)
    table = Table(title=title, title_justify="left")
    for heading in ("stage", "kind", *(name.replace("_", " ") for name in COLUMNS), "service cores"):
        table.add_column(heading, overflow="fold")
    for stage in (stage for stage in run.stages if stage.name != WARM_UP):
        for kind, found in stage.kinds.items():
            cores = amount(sum(stage.cores.values())) if kind == ALL and stage.cores else ""
            table.add_row(stage.name, kind, *(cell(getattr(found, name)) for name in COLUMNS), cores, end_section=kind == ALL)
    terminal.print(table)
    if run.knee:
        more = "" if run.knee.reached else " (not reached: it is further on)"
        more = more if run.knee.late_ms is None else f" (not judged: the generator was {run.knee.late_ms:,.0f} ms late)"
        terminal.print(
            f"knee: {run.knee.rate:,.1f} requests/s, {run.knee.stage.all.tokens_per_s:,.0f} tokens/s, {run.knee.stage.name}{more}"
        )
    if run.flatness:
        growth = Table("series", "unit", "begin", "end", "growth", "")
        for grown in run.flatness:
            sizes = map(amount, (grown.begin, grown.end, grown.growth))
            growth.add_row(grown.what, grown.unit, *sizes, "flat" if grown.flat else "NOT FLAT")
        terminal.print(growth)
    verdicts = Table("mark", "figure", "bound", "", "why")
    for each in judged:
        verdicts.add_row(*each.words, each.mark.why)
    terminal.print(verdicts)


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else amount(value) if value else "0"
