"""The model card of a decoder of pictures."""

from typing import Any

from models.training.cards import Card, table
from models.training.text.card import amount

SAMPLES = "samples.png"


def image_card(report: dict[str, Any], sources: dict[str, Any]) -> Card:
    """Return the card. `sources` is the content of sources.json."""
    config, model, image, of = report["config"], report["config"]["model"], sources["image"], sources["data_set"]
    found, totals, (package,) = report["held_out"]["carried"], sources["totals"], sources["packages"]
    n_pixels = image["width"] * image["height"]
    size, prompts = f"{image['width']}x{image['height']}", ", ".join(image["prompts"])
    rows = [(name, f"{bits:.3f}") for name, bits in found["packages"].items()]
    return Card(
        tags=["image-generation"],
        about=f"""A decoder of {report["parameters"] / 1e6:.2f} million parameters that draws {size} pictures pixel by pixel,
each pixel a token:
{model["n_layers"]} blocks of width {model["d_model"]}, {model["n_heads"]} heads, layers `{model["layers"]}`. Prompts: {prompts}.
Weights in {config["weights"]}.
The experiment is that of Katharopoulos et al. 2020, arXiv:2006.16236, section 4.2, on smaller data.""",
        use="showing and measuring a server of constant-size states. Nothing else should depend on what it draws.",
        request=f"""curl -s http://127.0.0.1:8000/v1/images/generations -H 'content-type: application/json' \\
  -d '{{"model": "{report["name"]}", "prompt": "{image["prompts"][-1]}"}}' | jq -r .data[0].b64_json | base64 -d > picture.png""",
        figures=[
            f"## What it draws\n\nSampled once at temperature 1, seed 0, and not chosen.\n\n![Four pictures for each prompt]({SAMPLES})",
            f"""## Bits per pixel

Of {report["held_out"]["bytes"] // (n_pixels + 1):,} pictures that were not trained on, in {len(image["letters"])} grey levels. A
picture is written as {n_pixels + 1} bytes, its prompt
and its pixels, so the bits per byte of this repository are bits per pixel (bits/dim); the prompt, which the model has to guess here, and
the end are counted with them. Figures for MNIST, which has 256 levels, are not comparable.

{table(("pictures of", "bits per pixel"), [*rows, ("**all**", f"**{found['overall']:.3f}**")])}

![Bits per pixel against tokens and minutes](loss.png)""",
        ],
        data=f"""{of["name"]}, {of["authors"]}, {of["url"]}, {of["licence"]}, as {package["name"]} {package["version"]}
({package["licence"]}) carries it:
{sources["made"]}.
{totals["train"]["files"]:,} pictures to train on, {totals["held_out"]["files"]:,} held out, all of them of other originals.""",
        amount=amount(report),
        limits=[
            f"It draws {prompts} at {size} and nothing else; larger pictures are these, enlarged.",
            "The originals are coarse (8x8), and so are the strokes. Who wrote which is not known: a hand may be in both splits.",
            "A picture may resemble one of the few it has learned from.",
        ],
    )
