"""python -m tests.models.training.distillation.killed TEACHER DATA OUT CONFIG STEP: a distillation that kills itself after a step."""

import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console

from models.training.distillation.config import DistillationConfig
from models.training.distillation.task import DistillationTask, distill


def main(teacher: str, data: str, out: str, config: str, step: str) -> None:
    torch.set_num_threads(1)
    learning_rates = DistillationTask.learning_rates

    def and_kill(task: DistillationTask, now: int, share: float) -> tuple[float, float]:
        if now == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        return learning_rates(task, now, share)

    DistillationTask.learning_rates = and_kill  # type: ignore[method-assign]
    distill(Path(teacher), Path(data), Path(out), DistillationConfig.model_validate_json(config), Console(quiet=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
