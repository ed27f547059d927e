"""Chooses the range of an encoder's int8 weights: 8 and 7 bits are measured on this machine, and the fastest accurate one is kept."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from export import contract
from export.checks.golden import EncoderExamples
from export.checks.parity import answers, feed_of, open_graph
from export.errors import ExportError
from export.graphs.onnx_file import optimise, save
from export.int8.recipes import RECIPES, Recipe, column_peaks, per_token, with_matmuls

BATCH, TOKENS, SECONDS = 8, 16, 1.0
ROUNDS = 5  # rounds of a measurement; their median is robust to one or two slow ones
AS_FAST = 0.85  # recipes above this share of the fastest rate count as equally fast; the best cosine decides between them


@dataclass(frozen=True)
class TrialInputs:
    """The inputs of all trials."""

    graph: Path  # the fp32 graph with q, k and v projected outside the attention operator, not yet optimised
    fp32: Path  # the optimised fp32 graph, for comparison
    judged: EncoderExamples  # texts whose cosines are measured
    calibration: EncoderExamples  # texts from which the smoothing factors are computed
    outputs: tuple[contract.Tensor, ...]
    vocab_size: int
    min_cosine: float


def choose(
    task: TrialInputs, scratch: Path, *, recipes: Sequence[Recipe] = RECIPES, progress: Callable[[float], None] = lambda fraction: None
) -> tuple[Path, tuple[contract.RecipeTrial, ...]]:
    """Return the optimised graph of the best recipe, and the results of all recipes.

    Raises ExportError with the cosine of each recipe if none reaches `min_cosine`.
    """
    baseline = _rate(task, task.fp32)
    peaks = column_peaks(with_matmuls(onnx.load(task.graph)), task.calibration.feeds)
    trials: list[contract.RecipeTrial] = []
    files: list[Path] = []
    for number, recipe in enumerate(recipes):
        progress(number / len(recipes))
        quantised = scratch / f"{number}.onnx"
        save(per_token(with_matmuls(onnx.load(task.graph)), peaks, weight_levels=recipe.weight_levels), quantised, weights_beside=True)
        files.append(optimise(quantised, scratch / str(number)))
        for part in scratch.glob(f"{quantised.name}*"):
            part.unlink()
        trials.append(_trial(task, recipe, files[-1], baseline))
    best = _best(trials, task.min_cosine)
    return files[best], tuple(trial.model_copy(update={"kept": number == best}) for number, trial in enumerate(trials))


def _trial(task: TrialInputs, recipe: Recipe, file: Path, baseline: float) -> contract.RecipeTrial:
    rows = task.judged.run(answers(open_graph(file), task.outputs))
    cosines = task.judged.cosines(rows)
    return contract.RecipeTrial(
        recipe=recipe.name,
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        rank_correlation=task.judged.rank_correlation(rows),
        size_bytes=sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*")),
        texts_per_s=_rate(task, file),
        baseline_texts_per_s=baseline,
        kept=False,
    )


def _best(trials: list[contract.RecipeTrial], min_cosine: float) -> int:
    close = [trial for trial in trials if trial.min_cosine >= min_cosine]
    if not close:
        reached = "; ".join(f"{trial.recipe}: {trial.min_cosine:.4f}" for trial in trials)
        raise ExportError(
            f"no int8 recipe reaches a cosine of {min_cosine} on every text. Lowest cosines: {reached}. Lower --min-cosine or keep fp32"
        )
    fastest = max(trial.texts_per_s for trial in close)
    kept = max((trial for trial in close if trial.texts_per_s >= AS_FAST * fastest), key=lambda trial: trial.min_cosine)
    return trials.index(kept)


def _rate(task: TrialInputs, file: Path) -> float:
    """Return texts per second of one core's CPU time: the median of equal rounds after a warm-up run."""
    session = open_graph(file, threads=1)
    ids = np.random.default_rng(0).integers(0, task.vocab_size, (BATCH, TOKENS))
    feed = feed_of(session.get_inputs(), ids, np.ones_like(ids), np.zeros_like(ids))
    run = partial(session.run, task.judged.compared, feed)
    run()
    return statistics.median(_round(run) for _ in range(ROUNDS))


def _round(run: Callable[[], object]) -> float:
    runs, started = 0, time.thread_time()
    while (passed := time.thread_time() - started) < SECONDS / ROUNDS:
        run()
        runs += 1
    return runs * BATCH / passed
