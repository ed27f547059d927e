"""python -m tests.models.training.number_words.killed CONFIG OUT STEP: a training that kills itself after a step, as from outside."""

import os
import signal
import sys
from pathlib import Path

import torch

from models.training.config import read_config
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.task import NumberWordsTask
from models.training.run import CHECKPOINTS
from models.training.trainer import Moment, train


def main(config_file: str, out: str, step: str) -> None:
    torch.set_num_threads(1)

    def show(moment: Moment) -> None:
        if moment.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    train(NumberWordsTask(read_config(Path(config_file), NumberWordsConfig), Path(config_file)), Path(out) / CHECKPOINTS, show=show)


if __name__ == "__main__":
    main(*sys.argv[1:])
