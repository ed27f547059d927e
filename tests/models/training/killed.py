"""python -m tests.models.training.killed DATA FOLDER CONFIG STEP: a training that kills itself after a step, as from outside."""

import os
import signal
import sys
from pathlib import Path

import torch

from models.training.config import TrainingConfig
from models.training.corpus import open_tokens
from models.training.text.task import TextTask, build
from models.training.trainer import Moment, train


def main(data: str, folder: str, config_json: str, step: str) -> None:
    torch.set_num_threads(1)
    config = TrainingConfig.model_validate_json(config_json)

    def show(moment: Moment) -> None:
        if moment.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)

    task = TextTask(config, open_tokens(Path(data), vocab_size=config.vocab_size), build(config, Path("config.yaml")))
    train(task, Path(folder), show=show)


if __name__ == "__main__":
    main(*sys.argv[1:])
