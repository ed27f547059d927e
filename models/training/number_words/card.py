"""Writes the model card of an encoder-decoder for number words."""

from dataclasses import fields
from typing import Any

from models.encoder_decoder.config import TransformerConfig
from models.training.cards import front_matter, training_section
from models.training.number_words.pictures import ATTENTION, CURVE
from models.training.number_words.words import LANGUAGES, in_words

GRU = "a GRU that reads in both directions, attention, and a modified GRU that writes (Bahdanau et al. 2014, arXiv:1409.0473)"
TRANSFORMER = "a Transformer on both sides (Vaswani et al. 2017, arXiv:1706.03762)"


def card(report: dict[str, Any]) -> str:
    """Return the model card as Markdown. `report` is the content of run.json."""
    training = training_section(report, f"{report['step']:,} steps of {report['config']['batch']} numbers")
    return "\n\n".join((_head(report), _figures(report), _data(report), training, _limits())) + "\n"


def _head(report: dict[str, Any]) -> str:
    config, name = report["config"], report["name"]
    languages = config["languages"]
    what = GRU
    if config["kind"] == "transformer":
        shape = {field.name: field.default for field in fields(TransformerConfig)} | config["model"]
        what = f"{TRANSFORMER}, {shape['norm']}-norm, {shape['activation']}, {shape['positions']} positions"
    return f"""{front_matter(language=languages, tags=["attnserve", "translation"])}

# {name}

{report["parameters"] / 1e6:.2f} million parameters that read a number in words and write its digits: {what}.
Characters are tokens. Numbers from 0 to {10 ** config["max_digits"] - 1:,} in {", ".join(LANGUAGES[language] for language in languages)}.

Intended use: showing, testing and measuring a server of encoder-decoders. A parser of number words is the better tool for the task itself.

    attnserve export --checkpoint THIS_FOLDER --out bundles/{name}
    attnserve serve --bundle bundles/{name}
    curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
      -d '{{"model": "{name}", "prompt": "{in_words(42_017, languages[0])}"}}' | jq -r .choices[0].text"""


def _figures(report: dict[str, Any]) -> str:
    found = report["exact_matches"]
    digits = list(next(iter(found["greedy"]["cells"].values())))
    lines = [
        "## Exact matches",
        "",
        f"Of {found['greedy']['numbers']:,} numbers that were held out with the ranges they are in, each magnitude and language alike (of",
        "three digits there are 36 such numbers, of the others 100 were drawn). A number counts if every digit is right. In per cent, by",
        "greedy search; the last column is a beam of 4, ranked by the mean log-probability of a token.",
        "",
        f"| language | {' | '.join(f'{n} digits' for n in digits)} | all | beam |",
        f"|---|{'---|' * (len(digits) + 2)}",
    ]
    for language, cells in found["greedy"]["cells"].items():
        of_beam = found["beam"]["cells"][language]
        shares = " | ".join(f"{100 * cells[n]:.0f}" for n in digits)
        lines.append(f"| {LANGUAGES[language]} | {shares} | {_mean(cells):.1f} | {_mean(of_beam):.1f} |")
    by_digits = " | ".join(f"{_mean({language: cells[n] for language, cells in found['greedy']['cells'].items()}):.1f}" for n in digits)
    lines.append(f"| **all** | {by_digits} | **{100 * found['greedy']['all']:.2f}** | **{100 * found['beam']['all']:.2f}** |")
    lines += ["", f"![Loss and exact matches against steps]({CURVE})", "", f"![What each digit was written from]({ATTENTION})"]
    return "\n".join(lines)


def _mean(shares: dict[str, float]) -> float:
    return 100 * sum(shares.values()) / len(shares)


def _data(report: dict[str, Any]) -> str:
    return f"""## Data

Random numbers in the words of `num2words` {report["data"]["num2words"]}, a new batch each step. Each magnitude is about as likely as the
next; in a quarter of the numbers half of the digits were made 0. A number of three digits or more was held out, in every language, if its
first three digits are 17 more than a multiple of 25 (117, 142, ... 992; 11,700 to 11,799, ...): 36 ranges of every magnitude,
4 % of all numbers."""


def _limits() -> str:
    return """## Limits

- It reads what `num2words` writes, in small or capital letters. Other spellings, digits, ordinals, fractions and negative numbers it has
  not seen, and it answers them with some number all the same.
- It does not report the language, and answers a text that is no number with a number too."""
