"""The training of an encoder-decoder that reads a number in words and writes its digits.

Besides what every task writes (see run.py), its output folder has:
OUT/
  config.json, model.safetensors, tokenizer.json   models/encoder_decoder/checkpoint.py
  loss.png         curves, drawn at every evaluation
"""

from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch.nn.functional as F
from tokenizers import Tokenizer

from models.checkpoints.own import CARD
from models.encoder_decoder.checkpoint import load_encoder_decoder, save_encoder_decoder
from models.encoder_decoder.config import RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.search import beam, greedy
from models.encoder_decoder.transformer import TransformerEncoderDecoder
from models.training.cards import Card, render, table
from models.training.curves import Curve, Panel, draw
from models.training.number_words.batches import FIRST_DIGITS, NumberWordsBatches
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.evaluation import Search, exact, examples, held_out_numbers
from models.training.number_words.tokens import BEGIN, END, character_tokenizer
from models.training.number_words.words import LANGUAGES, in_words
from models.training.number_words.words import draw as draw_number
from models.training.optimisation import learning_rate, optimizer_of, untrained
from models.training.task import Loss, Progress, Report, Task

BEAM = 4
MAX_SOURCE = 256  # longest source in characters; the words of a number of nine digits have at most 124
EVALUATION_SEED = "evaluation"


class NumberWordsTask(Task):
    """The training of an encoder-decoder on number words. Raises ConfigError if the model shape is not possible."""

    loss_steps = 20
    model: EncoderDecoder

    def __init__(self, config: NumberWordsConfig, config_file: Path) -> None:
        self.name, self.budget, self.config, self.tokenizer = config.name, config.budget, config, character_tokenizer()
        self.model = build(config, config_file, self.tokenizer)
        self.optimizer = optimizer_of(self.model, config)
        self.batches = NumberWordsBatches(
            self.tokenizer,
            batch=config.batch,
            seed=config.seed,
            languages=config.languages,
            max_digits=config.max_digits,
            all_digits_from=round(config.all_digits_from * config.max_steps),
        )
        random = Random(EVALUATION_SEED)
        self.sample = [
            draw_number(random, min_digits=FIRST_DIGITS, max_digits=config.max_digits, languages=config.languages, evaluation=True)
            for _ in range(config.evaluation_size)
        ]

    def learning_rates(self, step: int, share: float) -> list[float]:
        return [learning_rate(share, self.config)] * len(self.optimizer.param_groups)

    def loss(self, step: int) -> Loss:
        """Return the cross-entropy of the batch, in nats per output token."""
        batch = self.batches(step)
        logits = self.model(batch.source, batch.mask, batch.previous)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        return Loss(loss, loss, int(batch.mask.sum() + (batch.targets >= 0).sum()))

    def evaluate(self) -> dict[str, float]:
        right = exact(self.model, self.tokenizer, self.sample, greedy)
        return {"exact": sum(right) / len(right)}

    def describe(self, progress: Progress) -> list[str]:
        words = [f"loss {point['loss']:.4f}" for point in progress.losses[-1:]]
        return words + [f"held-out numbers right {point['exact']:.1%}" for point in progress.evaluations[-1:]]

    def facts(self) -> Report:
        return {
            "config": self.config.model_dump(mode="json"),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "data": {"num2words": version("num2words")},
        }

    def plot(self, report: Report, out: Path) -> None:
        loss = Curve("training numbers", report["losses"], lambda point: point["loss"], dots=False)
        exact = Curve("held-out numbers", report["evaluations"], lambda point: 100 * point["exact"])
        panels = [Panel("steps", "loss, nats an output token", [loss]), Panel("steps", "exactly right, %", [exact], log=False)]
        draw(panels, out / "loss.png", title=self.name)

    def finish(self, out: Path, report: Report) -> str:
        texts = examples(self.config.languages, max_digits=self.config.max_digits)
        save_encoder_decoder(out, self.model, tokenizer=self.tokenizer.to_str(pretty=True), examples=texts)
        written = load_encoder_decoder(out).model
        report["exact_matches"] = exact_matches(written, self.tokenizer, self.config)
        (out / CARD).write_text(render(_card(report), report), encoding="utf-8")
        shares = ", ".join(f"{search} {found['all']:.2%}" for search, found in report["exact_matches"].items())
        return f"exact matches of held-out numbers: {shares}"


def _card(report: Report) -> Card:
    config, found = report["config"], report["exact_matches"]
    shown = [
        (LANGUAGES[each], *(f"{100 * sum(found[by]['cells'][each].values()) / len(found[by]['cells'][each]):.1f}" for by in found))
        for each in config["languages"]
    ]
    rows = [*shown, ("**all**", *(f"**{100 * found[by]['all']:.2f}**" for by in found))]
    return Card(
        tags=["translation"],
        languages=config["languages"],
        about=f"""{report["parameters"] / 1e6:.2f} million parameters that read a number in words and write its digits, a
{config["kind"]} model on both sides. Characters are tokens. Numbers from 0 to {10 ** config["max_digits"] - 1:,} in
{", ".join(LANGUAGES[each] for each in config["languages"])}.

Intended use: showing, testing and measuring a server of encoder-decoders.""",
        request=f"""curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
  -d '{{"model": "{report["name"]}", "prompt": "{in_words(42_017, config["languages"][0])}"}}' | jq -r .choices[0].text""",
        figures=[
            f"""## Exact matches

Of {found["greedy"]["numbers"]:,} held-out numbers, in per cent. A number counts if every digit is right.

{table(("language", *found), rows)}

![Loss and exact matches against steps](loss.png)"""
        ],
        data=f"""Random numbers in the words of `num2words` {report["data"]["num2words"]}, a new batch each step. A number of three
digits or more was held out, in every language, if its first three digits are 17 more than a multiple of 25 (117, 142, ... 992).""",
        limits=["It reads what `num2words` writes, and answers every other text with some number all the same."],
    )


def build(config: NumberWordsConfig, config_file: Path, tokenizer: Tokenizer) -> EncoderDecoder:
    """Return an untrained model with parameters drawn from the seed. Raises ConfigError if the shape is not possible."""
    given: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "begin_token_id": tokenizer.token_to_id(BEGIN),
        "end_token_id": tokenizer.token_to_id(END),
        "max_source": MAX_SOURCE,
        "max_output": config.max_digits + 1,
    }

    def make() -> EncoderDecoder:
        if config.kind == "recurrent":
            return RecurrentEncoderDecoder(RecurrentConfig(**given, **config.model))
        return TransformerEncoderDecoder(TransformerConfig(**given, **config.model))

    return untrained(make, config.model, config_file, seed=config.seed)


def exact_matches(model: EncoderDecoder, tokenizer: Tokenizer, config: NumberWordsConfig) -> dict[str, Any]:
    """Evaluate greedy and beam search on held-out numbers. For each ("greedy", "beam") return a dict: "all", the share of exact matches;
    "numbers", the number of examples; "cells", the share of exact matches by language and number of digits."""
    found: dict[str, Any] = {}
    searches: dict[str, Search] = {"greedy": greedy, "beam": partial(beam, width=BEAM)}
    for name, search in searches.items():
        cells: dict[str, dict[str, float]] = {language: {} for language in config.languages}
        right: list[bool] = []
        for language in config.languages:
            for n_digits in range(FIRST_DIGITS, config.max_digits + 1):
                of_cell = exact(model, tokenizer, held_out_numbers(n_digits, language), search)
                cells[language][str(n_digits)] = sum(of_cell) / len(of_cell)
                right += of_cell
        found[name] = {"all": sum(right) / len(right), "numbers": len(right), "cells": cells}
    return found
