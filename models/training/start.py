"""Starts a training from its files: a decoder of text or pictures, or an encoder-decoder of number words."""

from pathlib import Path

import torch
from rich.console import Console

from models.folders.folder import in_sentences
from models.training.config import Optimisation, TrainingConfig, read_config
from models.training.corpus import open_tokens
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.task import NumberWordsTask
from models.training.pictures.task import PicturesTask
from models.training.run import run_task
from models.training.text.task import TextTask, build
from models.training.trainer import TrainingError


def train_decoder(config_file: Path, data: Path, out: Path, console: Console) -> bool:
    """Train a decoder of text or, if the data folder contains pictures, a decoder of pixels. Returns the result of `run_task`.

    Raises ConfigError, CorpusError, TokenizerError or ResumeError for invalid input, and TrainingError for other failures.
    """
    with in_sentences(f"training on {data} into {out} failed", TrainingError):
        config = read_config(config_file, TrainingConfig)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        else:
            _limit_threads(config)
        tokens = open_tokens(data, vocab_size=config.vocab_size)
        kind = TextTask if tokens.image is None else PicturesTask
        return run_task(kind(config, tokens, build(config, config_file).to(device)), out, console)


def train_number_words(config_file: Path, out: Path, console: Console) -> bool:
    """Train an encoder-decoder from number words to digits. Returns the result of `run_task`.

    Raises ConfigError or ResumeError for invalid input, and TrainingError for other failures.
    """
    with in_sentences(f"training into {out} failed", TrainingError):
        config = read_config(config_file, NumberWordsConfig)
        _limit_threads(config)
        return run_task(NumberWordsTask(config, config_file), out, console)


def _limit_threads(config: Optimisation) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
