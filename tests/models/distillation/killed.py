"""python -m tests.models.distillation.killed TEACHER DATA OUT PLAN STEP: a distillation that kills itself after a step, as from outside."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console

from models.distillation import run as running
from models.distillation.loop import Progress
from models.distillation.plan import Plan


def main(teacher: str, data: str, out: str, plan: str, step: str) -> None:
    torch.set_num_threads(1)
    shown = running.distil

    def distil(*arguments, show, **options) -> Progress:
        def and_kill(progress: Progress, tokens_per_s: float) -> None:
            if progress.step == int(step):
                os.kill(os.getpid(), signal.SIGKILL)

        return shown(*arguments, show=and_kill, **options)

    running.distil = distil
    running.run(Path(teacher), Path(data), Path(out), Plan(**json.loads(plan)), Console(quiet=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
