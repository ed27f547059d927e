"""The result of an evaluation as a table, a picture and JSON."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from export import contract
from loadtest.errors import LoadtestError

Results = Mapping[str, contract.Evaluation]  # by bundle: its name, or its folder if two have one name


def about(results: Results) -> str:
    """Return the task's name, size and licence, as a line."""
    first = next(iter(results.values()))
    size = f"{first.queries:,} queries, {first.documents:,} documents" if first.documents else f"{first.queries:,} pairs"
    return f"{first.task}: {size}; licence of the texts: {first.licence or 'not known'}"


def table(results: Results) -> Table:
    """Return a table with a row for each way of each bundle; the best figure of a metric is bold."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("bundle", overflow="fold")
    drawn.add_column("way", no_wrap=True)
    metrics = [*next(iter(results.values())).ways[0].figures]
    for metric in metrics:
        drawn.add_column(metric, justify="right")
    drawn.add_column("embedding space", overflow="fold")
    best = {metric: max(way.figures[metric] for result in results.values() for way in result.ways) for metric in metrics}
    for bundle, result in results.items():
        for way in result.ways:
            cells = [f"[bold]{figure:.4f}[/]" if figure == best[metric] else f"{figure:.4f}" for metric, figure in way.figures.items()]
            drawn.add_row(escape(bundle), way.way, *cells, " ".join(way.spaces))
    return drawn


def write_json(results: Results, file: Path) -> None:
    """Write the results, by bundle."""
    content = {bundle: result.model_dump(mode="json") for bundle, result in results.items()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(results: Results, file: Path) -> None:
    """Write a picture with a panel for each metric: a group of bars for each way, a colour for each bundle."""
    from matplotlib.figure import Figure

    first = next(iter(results.values()))
    ways = list(dict.fromkeys(way.way for result in results.values() for way in result.ways))
    metrics = [*first.ways[0].figures]
    figure = Figure(figsize=(1.5 + 3 * len(metrics), 1.5 + 0.15 * len(ways) * (len(results) + 1)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    height = 0.8 / len(results)
    for axes, metric in zip(panels, metrics, strict=True):
        for at, (bundle, result) in enumerate(results.items()):
            places = [ways.index(way.way) + (at - (len(results) - 1) / 2) * height for way in result.ways]
            axes.barh(places, [way.figures[metric] for way in result.ways], height, color=f"C{at}", label=bundle)
        axes.set(xlabel=metric, yticks=range(len(ways)), yticklabels=ways)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(results), frameon=False, fontsize="small")
    figure.suptitle(first.task)
    figure.savefig(file, dpi=130, format="png")


def check(results: Results, demands: Mapping[str, float]) -> None:
    """Raise LoadtestError if a figure is below what is demanded. A demand is of METRIC, which is that of a bundle's first way, or of
    WAY:METRIC.
    """
    for demand, least in demands.items():
        name, _, metric = demand.rpartition(":")
        for bundle, result in results.items():
            way = next((way for way in result.ways if way.way == name), None) if name else result.ways[0]
            if way is None or metric not in way.figures:
                ways, metrics = ", ".join(way.way for way in result.ways), ", ".join(result.ways[0].figures)
                raise LoadtestError(
                    f"--at-least {demand}={least:g}: {bundle} has the ways {ways} and the metrics {metrics} in {result.task}"
                )
            if (figure := way.figures[metric]) < least:
                raise LoadtestError(f"--at-least {demand}={least:g}: {metric} of {bundle}, {way.way}, is {figure} in {result.task}")
