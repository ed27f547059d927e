"""Parts that all model cards share. A model card is the README.md beside the weights, for users of the model."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import yaml

from models.training.task import Report

MB = 1_000_000


def front_matter(**fields: Any) -> str:
    """Return the YAML head of a model card, which model hubs read."""
    return f"---\n{yaml.safe_dump({'license': 'apache-2.0'} | fields)}---"


def licence_table(packages: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table with licence, number of packages and total size, the largest size first. `packages` is the
    list of that name in sources.json."""
    by_licence: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for package in packages:
        by_licence[package["licence"]].append(package)
    sizes = {licence: sum(package["bytes"] for package in found) for licence, found in by_licence.items()}
    rows = [
        f"| {licence} | {len({package['name'] for package in by_licence[licence]})} | {size / MB:.2f} |"
        for licence, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    return ["| licence | packages | MB |", "|---|---|---|", *rows]


def held_out_packages(sources: dict[str, Any]) -> str:
    return ", ".join(package["name"] for package in sources["packages"] if package["split"] == "held_out")


def training_section(report: Report, amount: str) -> str:
    """Return a Markdown section: the amount of training, its time and hardware, and the config."""
    config = {name: value for name, value in report["config"].items() if value is not None}
    return f"""## Training

{amount} in {report["seconds"] / 60:.1f} minutes on
{report["hardware"]} ({report["tokens_per_s"]:,.0f} tokens/s), {report["date"]}, torch {report["torch"]}, AdamW. The config:

```yaml
{yaml.safe_dump(config, sort_keys=False).strip()}
```"""
