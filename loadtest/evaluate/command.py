"""`attnserve evaluate BUNDLE..`: nDCG, recall, MRR or Spearman's correlation of a bundle's vectors, in every way to compare them."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from export import contract
from loadtest.common.terminal import interruptible, stdout
from loadtest.errors import LoadtestError
from loadtest.evaluate import report
from loadtest.evaluate.made import TASKS, make
from loadtest.evaluate.run import evaluate, write
from loadtest.evaluate.tasks import Pairs, Retrieval, read
from loadtest.evaluate.vectors import VectorFile
from loadtest.evaluate.ways import WEIGHTS
from service.terminal import command_app, console, pairs, progress_bar

app = command_app()


@app.command()
def command(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles of encoders, shown side by side.", show_default=False)],
    task: Annotated[
        str, typer.Option(help=f"{' or '.join(TASKS)}, or a folder in BEIR's form, or a JSONL file of sentence1, sentence2 and score.")
    ] = "python-docs",
    out: Annotated[Path, typer.Option(help="Folder for TASK.json and TASK.png. Vectors are kept there and not computed again.")] = Path(
        "out/evaluate"
    ),
    at_least: Annotated[
        list[str] | None,
        typer.Option(help="METRIC=NUMBER or WAY:METRIC=NUMBER: exit with 1 if a bundle is below it. Can be repeated."),
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(help=f"OUTPUT=NUMBER in `hybrid`; {', '.join(f'{k}={v}' for k, v in WEIGHTS.items())} by default.")
    ] = None,
    write_: Annotated[bool, typer.Option("--write", help="Write the figures into each bundle's manifest, as evidence.")] = False,
) -> None:
    """Measure how well the vectors of bundles find documents, or agree with scores of pairs.

    Every way to compare is shown: dense vectors as they are, in 8 bits, in 1 bit (and then compared again), with fewer dimensions; sparse
    vectors, token matrices by MaxSim, and all together. After Ctrl-C or a kill, the same command continues.
    """
    demands = _numbers(at_least, "--at-least")
    weights = dict[str, float](WEIGHTS.items()) | _numbers(weight, "--weight")
    if unknown := sorted(set(weights) - set(WEIGHTS)):
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(WEIGHTS)}", param_hint="--weight")
    names = [contract.read_manifest(bundle).name for bundle in bundles]
    keys = names if len(set(names)) == len(names) else [str(bundle) for bundle in bundles]
    with interruptible():
        try:
            with progress_bar() as show, VectorFile(out / "vectors.sqlite") as file:
                show(f"reading {task}", None)
                content = _task(task, out)
                results = {key: evaluate(bundle, content, file, weights, show) for key, bundle in zip(keys, bundles, strict=True)}
        except KeyboardInterrupt:
            console.print(f"stopped; the same command continues with the vectors in {out}")
            raise typer.Exit(130) from None
    files = [out / f"{content.name}.json", out / f"{content.name}.png"]
    report.write_json(results, files[0])
    if find_spec("matplotlib") is not None:
        report.draw(results, files[1])
    else:
        console.print("no picture is drawn, because matplotlib is not installed: pip install matplotlib")
        files.pop()
    terminal = stdout(width=140)
    terminal.print(report.about(results), markup=False, highlight=False)
    terminal.print(report.table(results))
    console.print(f"[green]{', '.join(map(str, files))}[/green]", soft_wrap=True)
    if write_:
        for key, bundle in zip(keys, bundles, strict=True):
            write(bundle, results[key])
            console.print(
                f"written into [green]{bundle}[/green], whose fingerprint is now {contract.read_manifest(bundle).fingerprint[:12]}"
            )
    report.check(results, demands)


def _task(name: str, out: Path) -> Retrieval | Pairs:
    if name in TASKS:
        return read(make(name, out / "tasks"))
    if not (path := Path(name)).exists():
        raise LoadtestError(f"--task {name}: there is no such file or folder, and the tasks that can be made are {', '.join(TASKS)}")
    return read(path)


def _numbers(given: list[str] | None, flag: str) -> dict[str, float]:
    """Parse NAME=NUMBER strings. Raises typer.BadParameter for any other string."""
    found = {}
    for name, value in pairs(given, flag).items():
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise typer.BadParameter(f"{name}={value!r} is not a number", param_hint=flag)
    return found
