"""The template of all model cards. A model card is the README.md beside the weights, for users of the model."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from models.training.task import Report

MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Card:
    """The parts of a model card that differ between tasks, as Markdown."""

    tags: Sequence[str]
    about: str  # what the model is
    use: str = ""  # what it is for
    before: Sequence[str] = ()  # command lines before the export
    checkpoint: str = "THIS_FOLDER"  # what is exported
    request: str = ""  # a command line that sends a request
    figures: Sequence[str]  # sections
    data: str
    amount: str  # of training, before "in .. minutes"
    limits: Sequence[str]
    fields: dict[str, Any] | None = None  # further fields of the YAML head


def render(card: Card, report: Report) -> str:
    """Return the card in Markdown. `report` is the content of run.json."""
    name, config = report["name"], {key: value for key, value in report["config"].items() if value is not None}
    served = [f"attnserve serve --bundle bundles/{name}", *card.request.split("\n")] if card.request else []
    commands = [*card.before, f"attnserve export --checkpoint {card.checkpoint} --out bundles/{name}", *served]
    sections = (
        f"---\n{yaml.safe_dump({'license': 'apache-2.0', 'tags': ['attnserve', *card.tags]} | (card.fields or {}))}---",
        f"# {name}",
        card.about,
        *([f"Intended use: {card.use}"] if card.use else []),
        "\n".join(f"    {line}" for line in commands),
        *card.figures,
        f"## Data\n\n{card.data}",
        f"## Training\n\n{card.amount} in {report['seconds'] / 60:.1f} minutes on\n{report['hardware']} "
        f"({report['tokens_per_s']:,.0f} tokens/s), {report['date']}, torch {report['torch']}, AdamW. The config:\n\n"
        f"```yaml\n{yaml.safe_dump(config, sort_keys=False).strip()}\n```",
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in card.limits),
    )
    return "\n\n".join(sections) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def licence_table(packages: Iterable[dict[str, Any]]) -> str:
    """Return a table of licence, number of packages and size, the largest first. `packages` is that list of sources.json."""
    by_licence: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for package in packages:
        by_licence[package["licence"]].append(package)
    sizes = {licence: sum(package["bytes"] for package in found) for licence, found in by_licence.items()}
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    rows = ((name, str(len({package["name"] for package in by_licence[name]})), f"{size / MB:.2f}") for name, size in largest_first)
    return table(("licence", "packages", "MB"), rows)


def held_out_packages(sources: dict[str, Any]) -> str:
    return ", ".join(package["name"] for package in sources["packages"] if package["split"] == "held_out")
