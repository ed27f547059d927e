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
    about: str  # what the model is, and its intended use
    before: Sequence[str] = ()  # command lines before the export
    checkpoint: str = "THIS_FOLDER"  # what is exported
    request: str = ""  # a command line that sends a request
    figures: Sequence[str]  # sections
    data: str
    limits: Sequence[str]
    languages: Sequence[str] = ()  # in the YAML head


def render(card: Card, report: Report) -> str:
    """Return the card in Markdown. `report` is the content of run.json."""
    name, config = report["name"], {key: value for key, value in report["config"].items() if value is not None}
    head = {"license": "apache-2.0", "tags": ["attnserve", *card.tags]} | ({"language": [*card.languages]} if card.languages else {})
    commands = [*card.before, f"attnserve export --checkpoint {card.checkpoint} --out bundles/{name}"]
    commands += [f"attnserve serve --bundle bundles/{name}", *card.request.split("\n")] if card.request else []
    sections = (
        f"---\n{yaml.safe_dump(head)}---",
        f"# {name}",
        card.about,
        "\n".join(f"    {line}" for line in commands),
        *card.figures,
        f"## Data\n\n{card.data}",
        f"## Training\n\n{report['step']:,} steps, {report['tokens'] / 1e6:.2f} million tokens in {report['seconds'] / 60:.1f} minutes on\n"
        f"{report['hardware']} ({report['tokens_per_s']:,.0f} tokens/s), {report['date']}, torch {report['torch']}, AdamW. The config:\n\n"
        f"```yaml\n{yaml.safe_dump(config, sort_keys=False).strip()}\n```",
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in card.limits),
    )
    return "\n\n".join(sections) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def collected(sources: dict[str, Any]) -> str:
    """Describe the texts that `collect` wrote, with a table of their licences. `sources` is the content of sources.json."""
    by_licence: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for package in sources["packages"]:
        by_licence[package["licence"]].append(package)
    sizes = {licence: sum(package["bytes"] for package in found) for licence, found in by_licence.items()}
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    rows = ((name, str(len({package["name"] for package in by_licence[name]})), f"{size / MB:.2f}") for name, size in largest_first)
    train, held_out = (sources["totals"][split] for split in ("train", "held_out"))
    packages = ", ".join(package["name"] for package in sources["packages"] if package["split"] == "held_out")
    return f"""Python source and documentation found on the training machine, {sources["rule"]}:
{train["bytes"] / MB:.1f} MB in {train["files"]:,} files to train on, and {held_out["bytes"] / MB:.1f} MB held out as whole packages
({packages}). `sources.json` lists every package with its licence and counts what was left out.

{table(("licence", "packages", "MB"), rows)}"""
