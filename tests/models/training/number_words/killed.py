"""python -m tests.models.training.number_words.killed CONFIG OUT STEP: a training that kills itself after a step, as from outside."""

import os
import signal
import sys
from pathlib import Path

import torch

from models.training.config import read_config
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.loop import Progress, train
from models.training.number_words.run import CHECKPOINTS, build
from models.training.number_words.tokens import character_tokenizer


def main(config_file: str, out: str, step: str) -> None:
    torch.set_num_threads(1)
    config, tokenizer = read_config(Path(config_file), NumberWordsConfig), character_tokenizer()

    def show(progress: Progress) -> None:
        if progress.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    train(build(config, Path(config_file), tokenizer), tokenizer, config, Path(out) / CHECKPOINTS, show=show)


if __name__ == "__main__":
    main(*sys.argv[1:])
