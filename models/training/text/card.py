"""The model card of a decoder of text."""

from typing import Any

from models.training.cards import MB, Card, held_out_packages, licence_table, table


def text_card(report: dict[str, Any], sources: dict[str, Any], samples: list[tuple[str, str]]) -> Card:
    """Return the card. `sources` is the content of sources.json, and `samples` are pairs (prompt, continuation)."""
    config, model, totals = report["config"], report["config"]["model"], sources["totals"]
    carried, windows = report["held_out"]["carried"], report["held_out"]["windows"]
    layers = model["layers"] if isinstance(model["layers"], str) else ", ".join(model["layers"])
    rows = [(name, f"{bits:.3f}", f"{windows['packages'][name]:.3f}") for name, bits in carried["packages"].items()]
    rows.append(("**all**", f"**{carried['overall']:.3f}**", f"**{windows['overall']:.3f}**"))
    shown = [f"````python\n{prompt}⟨here the model goes on⟩{continuation}\n````" for prompt, continuation in samples]
    return Card(
        tags=["python", "text-generation"],
        fields={"language": ["code", "en"]},
        about=f"""A decoder of {report["parameters"] / 1e6:.2f} million parameters that continues Python source:
{model["n_layers"]} blocks of width
{model["d_model"]}, {model["n_heads"]} heads, layers `{layers}`; byte-level BPE with {config["vocab_size"]:,} tokens. Weights in
{config["weights"]}.""",
        use="trying out and testing a server of constant-size states, and comparing layers at equal size and budget. It is far too small\n"
        "to help with programming: its text looks like Python more often than it is correct.",
        figures=[
            f"""## Bits per byte

Of {report["held_out"]["bytes"]:,} bytes in packages of which nothing was trained on. Every token counts once; documents begin from an empty
state. *Carried*: the past of the whole document. *Windows*: no more of it than in training, {config["context"]} tokens at most.

{table(("package", "carried", "windows"), rows)}

![Bits per byte against tokens and minutes](loss.png)""",
            "\n\n".join(("## What it writes", "Sampled once at temperature 0.5, seed 0, and not chosen.", *shown)),
        ],
        data=f"""Python source and documentation found on the training machine, {sources["rule"]}:
{totals["train"]["bytes"] / MB:.1f} MB in {totals["train"]["files"]:,} files to train on, and
{totals["held_out"]["bytes"] / MB:.1f} MB held out as
whole packages ({held_out_packages(sources)}). Left out: packages under other licences, files that name a copyleft licence, code carried
along from elsewhere, tests, generated files, tables, copies and near copies, those of held-out files included. Copyright heads were cut
off. `sources.json` lists every package with its licence and counts what was left out.

{licence_table(sources["packages"])}""",
        amount=amount(report),
        limits=[
            f"It was trained on sequences of {config['context']} tokens and did not learn to use text from further back.",
            "It knows Python and the English of its documentation, invents names that do not exist, and may repeat training text.",
            "It was not trained to follow or to refuse instructions.",
        ],
    )


def amount(report: dict[str, Any]) -> str:
    epochs = report["tokens"] / report["data"]["train_tokens"]
    return f"{report['step']:,} steps, {report['tokens'] / 1e6:.2f} million tokens ({epochs:.2f} epochs)"
