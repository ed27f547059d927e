"""The training of a decoder that generates pictures pixel by pixel. All its documents are pictures of one size."""

from pathlib import Path

from tokenizers import Tokenizer

from models.checkpoints.decoder import save_decoder
from models.decoder.model import Decoder
from models.training.cards import Card, table
from models.training.task import Report
from models.training.text.task import TextTask
from models.training.tokenizer import beginning


class PicturesTask(TextTask):
    """The training of a decoder on pictures. `tokens.image` must not be None."""

    def save(self, out: Path, model: Decoder) -> None:
        """Write the checkpoint. Its tokenizer puts <|endoftext|> before each prompt, as every training sequence began with it."""
        end = self.tokens.end_of_text
        tokenizer = beginning(Tokenizer.from_file(str(self.tokens.tokenizer_file))).to_str(pretty=True)
        save_decoder(out, model, tokenizer=tokenizer, eos_token_ids=(end,), bos_token_id=end, image=self.tokens.image)

    def card(self, report: Report) -> Card:
        config, model, sources, found = report["config"], report["config"]["model"], self.tokens.sources, report["held_out"]["carried"]
        image, of, totals, (package,) = sources["image"], sources["data_set"], sources["totals"], sources["packages"]
        size, prompts = f"{image['width']}x{image['height']}", ", ".join(image["prompts"])
        rows = [(name, f"{bits:.3f}") for name, bits in found["packages"].items()]
        return Card(
            tags=["image-generation"],
            about=f"""A decoder of {report["parameters"] / 1e6:.2f} million parameters that draws {size} pictures pixel by pixel, each pixel
a token: {model["n_layers"]} blocks of width {model["d_model"]}, {model["n_heads"]} heads, layers `{model["layers"]}`. Prompts: {prompts}.
Weights in {config["weights"]}. The experiment is that of Katharopoulos et al. 2020, arXiv:2006.16236, section 4.2, on smaller data.

Intended use: showing and measuring a server of constant-size states.""",
            request=f"""curl -s http://127.0.0.1:8000/v1/images/generations -H 'content-type: application/json' \\
  -d '{{"model": "{report["name"]}", "prompt": "{image["prompts"][-1]}"}}' | jq -r .data[0].b64_json | base64 -d > picture.png""",
            figures=[
                f"""## Bits per pixel

Of held-out pictures in {len(image["letters"])} grey levels. A picture is written as its prompt and a byte for each pixel, so the bits per
byte of this repository are bits per pixel (bits/dim). Figures for MNIST, which has 256 levels, are not comparable.

{table(("pictures of", "bits per pixel"), [*rows, ("**all**", f"**{found['overall']:.3f}**")])}

![Bits per pixel against tokens and minutes](loss.png)"""
            ],
            data=f"""{of["name"]}, {of["authors"]}, {of["url"]}, {of["licence"]}, as {package["name"]} {package["version"]}
({package["licence"]}) carries it: {sources["made"]}.
{totals["train"]["files"]:,} pictures to train on, {totals["held_out"]["files"]:,} held out, all of them of other originals.""",
            limits=[f"It draws {prompts} at {size} and nothing else.", "A picture may resemble one of the few it has learned from."],
        )
