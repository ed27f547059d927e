"""`attnserve bench`: the service beside the bare runtime and a peer, in one session, in alternating rounds; see README.md here."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from export import contract
from loadtest.bench import peers
from loadtest.bench.rounds import Part, Plan, Rounds
from loadtest.bench.rows import rows
from loadtest.common import machine, report, wrk
from loadtest.common.terminal import chosen, console, interruptible, progress, show
from loadtest.errors import LoadtestError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def bench(
    bundle: Annotated[Path, typer.Option(help="Bundle of an fp32 encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each run of the load generator.")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="One round of one second: shows that it works, proves nothing.")] = False,
    only: Annotated[str, typer.Option(help="Parts to measure, with commas.")] = ",".join(Part),
    peer_env: Annotated[Path, typer.Option(help="Where `python -m loadtest.bench.peers install infinity` put infinity.")] = peers.INFINITY,
    out: Annotated[Path, typer.Option(help="Directory for the JSON of this run.")] = Path("out/bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
) -> None:
    """Measure the service side by side with the bare runtime and with infinity-emb.

    Starts and stops everything itself. Ends with 1 when a bar is missed, but for --quick. Leave the machine alone meanwhile.
    """
    parts = chosen(only, Part)
    manifest = contract.verify(bundle)
    if manifest.kind != "encoder":
        raise LoadtestError(f"{bundle} is of kind {manifest.kind}: only encoders are measured here")
    if parts & {Part.short, Part.mix}:
        wrk.binary()
    missing = peers.missing(peer_env)
    plan = Plan(
        bundle=bundle,
        model=manifest.name,
        max_tokens=manifest.limits.max_tokens,
        rounds=1 if quick else rounds,
        seconds=1 if quick else seconds,
        parts=parts,
        threads=machine.cpus(),
        peer=None if missing else peer_env,
    )
    about = told(plan, manifest)
    warn(about, missing, quick, plan)
    before = machine.cpu_times()
    measuring = Rounds(plan, lambda step: None)
    with interruptible(), progress(plan.steps) as measuring.show:
        measuring.run()
    after = machine.cpu_times()
    about["stolen_share"] = (after["stolen"] - before["stolen"]) / max(after["all"] - before["all"], 1)
    made = rows(plan, measuring.measurements, missing or measuring.peer_failure)
    path = out / f"{about['date'].replace(':', '-')}.json"
    report.write_json(path, made, about, measuring.measurements)
    hardware = f"{about['cpus']} cores, {about['cpu']}"
    title = f"{manifest.name}, {manifest.precision}, {hardware}, {plan.rounds} rounds of {plan.seconds:g} s, {about['date']}"
    show(made, title, markdown=markdown)
    if measuring.peer_failure:
        console.print(f"[yellow]infinity was not measured to the end:[/yellow] {measuring.peer_failure}", soft_wrap=True)
    console.print(f"every figure: {path}", soft_wrap=True)
    if not quick and any(row.verdict in (report.Verdict.failed, report.Verdict.invalid) for row in made):
        raise typer.Exit(1)


def told(plan: Plan, manifest: contract.Manifest) -> dict[str, Any]:
    """What goes into the JSON beside the figures."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["attnserve", "bench", *sys.argv[2:]] if sys.argv[1:2] == ["bench"] else sys.argv,
        **machine.describe(),
        "bundle": {"name": manifest.name, "precision": manifest.precision, "fingerprint": manifest.fingerprint},
        "plan": {"rounds": plan.rounds, "seconds": plan.seconds, "parts": sorted(plan.parts), "seed": plan.seed},
        "peer": {"name": "infinity-emb, optimum engine", "versions": peers.versions(plan.peer)} if plan.peer else None,
    }


def warn(about: dict[str, Any], missing: str | None, quick: bool, plan: Plan) -> None:
    load = about["load_average_before"][0]
    if load > 0.25 * about["cpus"]:
        console.print(f"[bold yellow]the machine is not idle[/bold yellow]: load average {load:.2f}. The figures will say little.")
    if quick or plan.rounds < 3:
        console.print("[yellow]fewer than 3 rounds: this shows that everything runs, the figures are not for quoting[/yellow]")
    if missing and plan.loads:
        console.print(f"[yellow]no peer[/yellow]: {missing}", soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="attnserve bench")
