"""Writes the model card of a decoder of pictures."""

from typing import Any

from models.training.cards import front_matter
from models.training.text.card import decoder_training

SAMPLES = "samples.png"


def image_card(report: dict[str, Any], sources: dict[str, Any]) -> str:
    """Return the model card as Markdown. `report` is the content of run.json, `sources` that of sources.json."""
    parts = (_head(report, sources["image"]), _samples(), _figures(report, sources["image"]), _data(sources), decoder_training(report))
    return "\n\n".join((*parts, _limits(sources["image"]))) + "\n"


def _head(report: dict[str, Any], image: dict[str, Any]) -> str:
    model, name = report["config"]["model"], report["name"]
    return f"""{front_matter(tags=["attnserve", "image-generation"])}

# {name}

A decoder of {report["parameters"] / 1e6:.2f} million parameters that draws {image["width"]}x{image["height"]} pictures pixel by pixel,
each pixel a token: {model["n_layers"]} blocks of width {model["d_model"]}, {model["n_heads"]} heads, layers `{model["layers"]}`.
Prompts: {", ".join(image["prompts"])}. Weights in {report["config"]["weights"]}. The experiment is that of Katharopoulos et al. 2020,
arXiv:2006.16236, section 4.2, on smaller data.

Intended use: showing and measuring a server of constant-size states. Nothing else should depend on what it draws.

    attnserve export --checkpoint THIS_FOLDER --out bundles/{name}
    attnserve serve --bundle bundles/{name}
    curl -s http://127.0.0.1:8000/v1/images/generations -H 'content-type: application/json' \\
      -d '{{"model": "{name}", "prompt": "{image["prompts"][-1]}"}}' | jq -r .data[0].b64_json | base64 -d > picture.png"""


def _samples() -> str:
    return f"## What it draws\n\nSampled once at temperature 1, seed 0, and not chosen.\n\n![Four pictures for each prompt]({SAMPLES})"


def _figures(report: dict[str, Any], image: dict[str, Any]) -> str:
    found, n_pixels = report["held_out"]["carried"], image["width"] * image["height"]
    n_pictures = report["held_out"]["bytes"] // (n_pixels + 1)
    rows = [f"| {name} | {bits:.3f} |" for name, bits in found["packages"].items()]
    return "\n".join(
        (
            "## Bits per pixel",
            "",
            f"Of {n_pictures:,} pictures that were not trained on, in {len(image['letters'])} grey levels. A picture is written as",
            f"{n_pixels + 1} bytes, its prompt and its pixels, so the bits per byte of this repository are bits per pixel (bits/dim); the",
            "prompt, which the model has to guess here, and the end are counted with them. Figures for MNIST, which has 256 levels, are",
            "not comparable.",
            "",
            "| pictures of | bits per pixel |",
            "|---|---|",
            *rows,
            f"| **all** | **{found['overall']:.3f}** |",
            "",
            "![Bits per pixel against tokens and minutes](loss.png)",
        )
    )


def _data(sources: dict[str, Any]) -> str:
    of, totals, (package,) = sources["data_set"], sources["totals"], sources["packages"]
    return f"""## Data

{of["name"]}, {of["authors"]}, {of["url"]}, {of["licence"]}, as {package["name"]} {package["version"]} ({package["licence"]}) carries it:
{sources["made"]}.
{totals["train"]["files"]:,} pictures to train on, {totals["held_out"]["files"]:,} held out, all of them of other originals."""


def _limits(image: dict[str, Any]) -> str:
    return f"""## Limits

- It draws {", ".join(image["prompts"])} at {image["width"]}x{image["height"]} and nothing else; larger pictures are these, enlarged.
- The originals are coarse (8x8), and so are the strokes. Who wrote which is not known: a hand may be in both splits.
- A picture may resemble one of the few it has learned from."""
