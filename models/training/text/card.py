"""Writes the model card of a decoder of text."""

from typing import Any

from models.training.cards import MB, front_matter, held_out_packages, licence_table, training_section


def model_card(report: dict[str, Any], sources: dict[str, Any], samples: list[tuple[str, str]]) -> str:
    """Return the model card in Markdown. `report` is the content of run.json, `sources` that of sources.json, and `samples` are pairs
    (prompt, continuation).
    """
    parts = (_head(report), _figures(report), _samples(samples), _data(sources), decoder_training(report), _limits(report))
    return "\n\n".join(parts) + "\n"


def _head(report: dict[str, Any]) -> str:
    model, config = report["config"]["model"], report["config"]
    layers = model["layers"] if isinstance(model["layers"], str) else ", ".join(model["layers"])
    return f"""{front_matter(language=["code", "en"], tags=["python", "attnserve", "text-generation"])}

# {report["name"]}

A decoder of {report["parameters"] / 1e6:.2f} million parameters that continues Python source: {model["n_layers"]} blocks of width
{model["d_model"]}, {model["n_heads"]} heads, layers `{layers}`; byte-level BPE with {config["vocab_size"]:,} tokens. Weights
in {config["weights"]}.

Intended use: trying out and testing a server of constant-size states, and comparing layers at equal size and budget. It is far too small
to help with programming: its text looks like Python more often than it is correct.

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
    totals = sources["totals"]
    return "\n".join(
        (
            "## Data",
            "",
            f"Python source and documentation found on the training machine, {sources['rule']}:",
            f"{totals['train']['bytes'] / MB:.1f} MB in {totals['train']['files']:,} files to train on, and",
            f"{totals['held_out']['bytes'] / MB:.1f} MB held out as whole packages ({held_out_packages(sources)}). Left out:",
            "packages under other licences, files that name a copyleft licence, code carried along from elsewhere, tests, generated files,",
            "tables, copies and near copies, those of held-out files included. Copyright heads were cut off. `sources.json` lists every",
            "package with its licence and counts what was left out.",
            "",
            *licence_table(sources["packages"]),
        )
    )


def decoder_training(report: dict[str, Any]) -> str:
    epochs = report["tokens"] / report["data"]["train_tokens"]
    return training_section(report, f"{report['step']:,} steps, {report['tokens'] / 1e6:.2f} million tokens ({epochs:.2f} epochs)")


def _limits(report: dict[str, Any]) -> str:
    return f"""## Limits

- It was trained on sequences of {report["config"]["context"]} tokens and did not learn to use text from further back.
- It knows Python and the English of its documentation, invents names that do not exist, and may repeat training text.
- It was not trained to follow or to refuse instructions."""
