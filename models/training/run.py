"""Runs a training task. Its results and checkpoints are in one folder, from which an interrupted run can be resumed.

OUT/
  run.json         config, data, hardware, curves, last evaluation
  checkpoints/     the newest checkpoint, from which the run resumes
  README.md        the model card
The task (see task.py) writes README.md and further files, such as the model and pictures of the curves.
"""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from models.training import checkpoints
from models.training.display import training_bar
from models.training.task import Progress, Report, Task
from models.training.trainer import stop_signals, train

RUN, CHECKPOINTS = "run.json", "checkpoints"


def run_task(task: Task, out: Path, console: Console) -> bool:
    """Train, or resume the run in `out`. Returns True if the budget is used and the model is written, False after a signal.

    Raises ResumeError if `out` has a run of another config or other data, TrainingError if a loss is not finite.
    """
    out.mkdir(parents=True, exist_ok=True)
    report = _begin(task, out)

    def write_curves(progress: Progress) -> None:
        write_report(out, report | progress.curves())
        task.plot(report | progress.curves(), out)

    with training_bar(task.name, console) as show, stop_signals() as stopping:
        progress = train(
            task, out / CHECKPOINTS, show=show, on_evaluation=write_curves, on_checkpoint=lambda: task.keep(out), stopping=stopping
        )
    report |= progress.curves() | {"tokens_per_s": progress.tokens / max(progress.seconds, 1e-9)}
    if task.budget.share(progress.step, progress.seconds) < 1:
        write_report(out, report)
        console.print(f"stopped after step {progress.step:,}; the same command resumes the run")
        return False
    with console.status("evaluating on all held-out data"):
        summary = task.finish(out, report)
    write_report(out, report)
    console.print(f"[green]{out}[/green]: {summary}")
    return True


def _begin(task: Task, out: Path) -> Report:
    """Write and return a new run.json, or return that of the run to resume. Raises ResumeError if its config or data differ."""
    report: Report = {
        "name": task.name,
        "hardware": hardware(next(task.model.parameters()).device),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        **json.loads(json.dumps(task.facts())),
    }
    if checkpoints.newest(out / CHECKPOINTS):
        earlier = checkpoints.read_json(out / RUN)
        for key in ("config", "data"):
            if changed := [name for name, value in report[key].items() if earlier.get(key, {}).get(name) != value]:
                raise checkpoints.ResumeError(f"{out} has a run with another {key}: {', '.join(changed)}; choose another --out")
        return earlier
    write_report(out, report | Progress().curves())
    return report


def hardware(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU and the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, torch threads: {torch.get_num_threads()}"


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Replace run.json atomically."""
    unfinished = out / f"{RUN}.unfinished"
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(out / RUN)
