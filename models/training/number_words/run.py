"""From a config to a checkpoint folder that `attnserve export` takes; resumable at every checkpoint.

OUT/
  config.json, model.safetensors, tokenizer.json   models/encoder_decoder/checkpoint.py
  README.md        the model card
  loss.png         curves, drawn anew at every evaluation
  attention.png    what the model looks at
  run.json         config, curves, hardware, exact matches by language and magnitude
  checkpoints/     what a stopped run goes on from
"""

from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from models.encoder_decoder.checkpoint import CARD, load_encoder_decoder, save_encoder_decoder
from models.encoder_decoder.config import RecurrentConfig, TransformerConfig
from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from models.encoder_decoder.search import beam, greedy
from models.encoder_decoder.transformer import TransformerEncoderDecoder
from models.folders.config_fields import bounded
from models.folders.folder import CheckpointError, check_memory, in_sentences
from models.training import checkpoints
from models.training.config import ConfigError, read_config
from models.training.loop import TrainingError, stop_signals
from models.training.number_words.batches import FIRST_DIGITS
from models.training.number_words.card import card
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.display import training_bar
from models.training.number_words.evaluation import exact, examples, held_out_numbers
from models.training.number_words.loop import Progress, train
from models.training.number_words.pictures import ATTENTION, CURVE, draw_attention, draw_curves
from models.training.number_words.tokens import BEGIN, END, character_tokenizer
from models.training.run import RUN, hardware, write_report

CHECKPOINTS = "checkpoints"
BEAM = 4
MAX_SOURCE = 256  # characters; the longest of nine digits has 124
KINDS = {"recurrent": (RecurrentConfig, RecurrentEncoderDecoder), "transformer": (TransformerConfig, TransformerEncoderDecoder)}


def run(config_file: Path, out: Path, console: Console) -> bool:
    """Train, or go on with what `out` has begun. True when all steps are done and the model is written, False after a signal.

    Raises ConfigError, ResumeError where `out` was begun with another config, and TrainingError for everything else.
    """
    with in_sentences(f"training into {out} failed", TrainingError):
        return _run(config_file, out, console)


def _run(config_file: Path, out: Path, console: Console) -> bool:
    config = read_config(config_file, NumberWordsConfig)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = character_tokenizer()
    model = build(config, config_file, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    report = _begin(out, config, model)

    def write_curves(progress: Progress) -> None:
        write_report(out, report | _curves(progress))
        draw_curves(report | _curves(progress), out / CURVE)

    with training_bar(config, console) as show, stop_signals() as stopping:
        progress = train(model, tokenizer, config, out / CHECKPOINTS, show=show, on_evaluation=write_curves, stopping=stopping)
    report |= _curves(progress)
    if progress.step < config.max_steps:
        console.print(f"stopped after step {progress.step:,}; the same command goes on from there")
        return False
    save_encoder_decoder(out, model, tokenizer=tokenizer.to_str(pretty=True), examples=examples(config.languages))
    with console.status("reading numbers that were held out"):
        written = load_encoder_decoder(out).model
        report["exact_matches"] = exact_matches(written, tokenizer, config)
    write_report(out, report)
    draw_curves(report, out / CURVE)
    draw_attention(written, tokenizer, config.languages, out / ATTENTION)
    (out / CARD).write_text(card(report), encoding="utf-8")
    shares = ", ".join(f"{how} {found['all']:.2%}" for how, found in report["exact_matches"].items())
    console.print(f"[green]{out}[/green]: exact matches of numbers held out: {shares}")
    return True


def build(config: NumberWordsConfig, config_file: Path, tokenizer: Tokenizer) -> EncoderDecoder:
    """The untrained model, drawn from the seed. Raises ConfigError for a shape that cannot be."""
    kind_config, kind = KINDS[config.kind]
    given = {
        "vocab_size": tokenizer.get_vocab_size(),
        "begin_token_id": tokenizer.token_to_id(BEGIN),
        "end_token_id": tokenizer.token_to_id(END),
        "max_source": MAX_SOURCE,
        "max_output": config.max_digits + 1,
    }
    try:
        bounded(config.model)
        asked = kind_config(**given, **config.model)
        with torch.device("meta"):
            check_memory(config_file, kind(asked))
        torch.manual_seed(config.seed)
        return kind(asked)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config_file}: model: {error}") from error


def exact_matches(model: EncoderDecoder, tokenizer: Tokenizer, config: NumberWordsConfig) -> dict[str, Any]:
    """{"greedy", "beam"} -> {"all": share, language -> {number of digits -> share}}, of the sample of `held_out_numbers`."""
    found: dict[str, Any] = {}
    for how, search in {"greedy": greedy, "beam": partial(beam, width=BEAM)}.items():
        cells: dict[str, Any] = {}
        right = []
        for language in config.languages:
            cells[language] = {}
            for n_digits in range(FIRST_DIGITS, config.max_digits + 1):
                of_cell = exact(model, tokenizer, held_out_numbers(n_digits, language), search)
                cells[language][str(n_digits)] = sum(of_cell) / len(of_cell)
                right += of_cell
        found[how] = {"all": sum(right) / len(right), "numbers": len(right), "cells": cells}
    return found


def _begin(out: Path, config: NumberWordsConfig, model: EncoderDecoder) -> dict[str, Any]:
    """What run.json says from the beginning. Raises ResumeError where it says otherwise already."""
    report = {
        "name": config.name,
        "config": config.model_dump(mode="json"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num2words": version("num2words"),
        "hardware": hardware(torch.device("cpu")),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if checkpoints.newest(out / CHECKPOINTS):
        earlier = checkpoints.read_json(out / RUN)
        if changed := [key for key, value in report["config"].items() if earlier["config"].get(key) != value]:
            raise checkpoints.ResumeError(f"{out} was begun with another config: {', '.join(changed)}; take another --out")
        if earlier["num2words"] != report["num2words"]:
            raise checkpoints.ResumeError(f"{out} was begun with num2words {earlier['num2words']}, and this is {report['num2words']}")
        return earlier
    write_report(out, report | _curves(Progress()))
    return report


def _curves(progress: Progress) -> dict[str, Any]:
    return {name: [vars(point) for point in getattr(progress, name)] for name in ("losses", "exact")}
