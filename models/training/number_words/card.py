"""The model card of an encoder-decoder for number words."""

from dataclasses import fields
from typing import Any

from models.encoder_decoder.config import TransformerConfig
from models.training.cards import Card, table
from models.training.number_words.words import LANGUAGES, in_words

CURVE, ATTENTION = "loss.png", "attention.png"
GRU = "a GRU that reads in both directions, attention, and a modified GRU that writes (Bahdanau et al. 2014, arXiv:1409.0473)"
TRANSFORMER = "a Transformer on both sides (Vaswani et al. 2017, arXiv:1706.03762)"


def number_words_card(report: dict[str, Any]) -> Card:
    config, name, languages = report["config"], report["name"], report["config"]["languages"]
    what = GRU
    if config["kind"] == "transformer":
        shape = {field.name: field.default for field in fields(TransformerConfig)} | config["model"]
        what = f"{TRANSFORMER}, {shape['norm']}-norm, {shape['activation']}, {shape['positions']} positions"
    greedy, beam = report["exact_matches"]["greedy"], report["exact_matches"]["beam"]
    cells, digits = greedy["cells"], list(next(iter(greedy["cells"].values())))
    rows = [
        (LANGUAGES[each], *(f"{100 * found[n]:.0f}" for n in digits), _mean(found), _mean(beam["cells"][each]))
        for each, found in cells.items()
    ]
    by_digits = [_mean({each: found[n] for each, found in cells.items()}) for n in digits]
    rows.append(("**all**", *by_digits, f"**{100 * greedy['all']:.2f}**", f"**{100 * beam['all']:.2f}**"))
    return Card(
        tags=["translation"],
        fields={"language": languages},
        about=f"""{report["parameters"] / 1e6:.2f} million parameters that read a number in words and write its digits: {what}.
Characters are tokens. Numbers from 0 to {10 ** config["max_digits"] - 1:,} in
{", ".join(LANGUAGES[language] for language in languages)}.""",
        use="showing, testing and measuring a server of encoder-decoders. A parser of number words is the better tool for the task itself.",
        request=f"""curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
  -d '{{"model": "{name}", "prompt": "{in_words(42_017, languages[0])}"}}' | jq -r .choices[0].text""",
        figures=[
            f"""## Exact matches

Of {greedy["numbers"]:,} numbers that were held out with the ranges they are in, each magnitude and language alike (of three
digits there are
36 such numbers, of the others 100 were drawn). A number counts if every digit is right. In per cent, by greedy search; the last column is
a beam of 4, ranked by the mean log-probability of a token.

{table(("language", *(f"{n} digits" for n in digits), "all", "beam"), rows)}

![Loss and exact matches against steps]({CURVE})

![What each digit was written from]({ATTENTION})"""
        ],
        data=f"""Random numbers in the words of `num2words` {report["data"]["num2words"]}, a new batch each step. Each magnitude
is about as likely as the next; in
a quarter of the numbers half of the digits were made 0. A number of three digits or more was held out, in every language, if its first
three digits are 17 more than a multiple of 25 (117, 142, ... 992; 11,700 to 11,799, ...): 36 ranges of every magnitude, 4 % of
all numbers.""",
        amount=f"{report['step']:,} steps of {config['batch']} numbers",
        limits=[
            "It reads what `num2words` writes, in small or capital letters. Other spellings, digits, ordinals, fractions and negative\n"
            "  numbers it has not seen, and it answers them with some number all the same.",
            "It does not report the language, and answers a text that is no number with a number too.",
        ],
    )


def _mean(shares: dict[str, float]) -> str:
    return f"{100 * sum(shares.values()) / len(shares):.1f}"
