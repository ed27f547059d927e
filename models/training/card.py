"""The model card: README.md beside the weights, for people who did not train them."""

from collections import defaultdict
from typing import Any

import yaml

MB = 1_000_000


def model_card(report: dict[str, Any], sources: dict[str, Any], samples: list[tuple[str, str]]) -> str:
    """Markdown with the front matter that model hubs read. `report` is run.json, `sources` sources.json."""
    parts = (_head(report), _figures(report), _samples(samples), _data(sources), training_section(report), _limits(report))
    return "\n\n".join(parts) + "\n"


def _head(report: dict[str, Any]) -> str:
    front = yaml.safe_dump({"license": "apache-2.0", "language": ["code", "en"], "tags": ["python", "attnserve", "text-generation"]})
    model, config = report["config"]["model"], report["config"]
    layers = model["layers"] if isinstance(model["layers"], str) else ", ".join(model["layers"])
    return f"""---
{front}---

# {report["name"]}

A decoder of {report["parameters"] / 1e6:.2f} million parameters that continues Python source: {model["n_layers"]} blocks of width
{model["d_model"]}, {model["n_heads"]} heads, layers `{layers}`; byte-level BPE with {config["vocab_size"]:,} tokens. Weights
in {config["weights"]}.

Intended use: trying out and testing a server of constant-size states, and comparing layers at equal size and budget. It is far too small
to be of help in programming, and what it writes looks like Python more often than it is right.

    attnserve export --checkpoint THIS_FOLDER --out bundles/{report["name"]}
    attnserve serve --bundle bundles/{report["name"]}"""


def _figures(report: dict[str, Any]) -> str:
    carried, windows = report["held_out"]["carried"], report["held_out"]["windows"]
    rows = [f"| {name} | {bits:.3f} | {windows['packages'][name]:.3f} |" for name, bits in carried["packages"].items()]
    return "\n".join(
        (
            "## Bits per byte",
            "",
            f"Of {report['held_out']['bytes']:,} bytes in packages of which nothing was trained on. Every token counts once; documents",
            "begin from an empty state. *Carried*: the past of the whole document. *Windows*: no more of it than in training,",
            f"{report['config']['context']} tokens at most.",
            "",
            "| package | carried | windows |",
            "|---|---|---|",
            *rows,
            f"| **all** | **{carried['overall']:.3f}** | **{windows['overall']:.3f}** |",
            "",
            "![Bits per byte against tokens and minutes](loss.png)",
        )
    )


def _samples(samples: list[tuple[str, str]]) -> str:
    shown = [f"````python\n{prompt}⟨here the model goes on⟩{continuation}\n````" for prompt, continuation in samples]
    return "\n\n".join(("## What it writes", "Sampled once at temperature 0.5, seed 0, and not chosen.", *shown))


def _data(sources: dict[str, Any]) -> str:
    by_licence: dict[str, list[dict]] = defaultdict(list)
    for package in sources["packages"]:
        by_licence[package["licence"]].append(package)
    summary = [
        f"| {licence} | {len(packages)} | {sum(p['bytes'] for p in packages) / MB:.2f} |"
        for licence, packages in sorted(by_licence.items(), key=lambda item: -sum(p["bytes"] for p in item[1]))
    ]
    held_out = [p["name"] for p in sources["packages"] if p["split"] == "held_out"]
    totals = sources["totals"]
    rows = [
        f"| {p['name']} | {p['version']} | {p['licence']} | {p['split'].replace('_', '-')} | {p['files']} | {p['bytes']:,} |"
        for p in sources["packages"]
    ]
    return "\n".join(
        (
            "## Data",
            "",
            f"Python source and documentation found on the training machine, {sources['rule']}:",
            f"{totals['train']['bytes'] / MB:.1f} MB in {totals['train']['files']:,} files to train on, and",
            f"{totals['held_out']['bytes'] / MB:.1f} MB held out as whole packages ({', '.join(held_out)}). Left out:",
            "packages under other licences, files that name a copyleft licence, code carried along from elsewhere, tests, generated files,",
            "tables, copies and near copies, those of held-out files included. Copyright heads were cut off. `sources.json` counts them.",
            "",
            "| licence | packages | MB |",
            "|---|---|---|",
            *summary,
            "",
            "<details><summary>All packages</summary>",
            "",
            "| package | version | licence | split | files | bytes |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "</details>",
        )
    )


def training_section(report: dict[str, Any]) -> str:
    config = {name: value for name, value in report["config"].items() if value is not None}
    last = report["losses"][-1] if report["losses"] else {"step": 0, "tokens": 0, "minutes": 0.0}
    epochs = last["tokens"] / report["data"]["train_tokens"]
    return f"""## Training

{last["step"]:,} steps, {last["tokens"] / 1e6:.2f} million tokens ({epochs:.2f} epochs) in {last["minutes"]:.1f} minutes on
{report["hardware"]} ({report["tokens_per_s"]:,.0f} tokens/s), {report["date"]}, torch {report["torch"]}, AdamW. The config:

```yaml
{yaml.safe_dump(config, sort_keys=False).strip()}
```"""


def _limits(report: dict[str, Any]) -> str:
    return f"""## Limits

- Trained on sequences of {report["config"]["context"]} tokens: what it keeps from further back it has not been taught to use.
- It knows Python and the English of its documentation, invents names that do not exist, and may repeat what it has read.
- It has had no training in following instructions or in refusing them."""
