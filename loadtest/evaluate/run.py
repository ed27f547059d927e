"""Evaluates a bundle in a task, and writes the figures into the bundle."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import uvloop

from export import contract
from loadtest.errors import LoadtestError
from loadtest.evaluate import metrics
from loadtest.evaluate.tasks import Pairs, Retrieval
from loadtest.evaluate.vectors import Show, VectorFile, compute
from loadtest.evaluate.ways import Texts, scores, ways_of
from loadtest.in_process.engine import opened
from service.runtime.onnx import Array

MOST_QUERIES, MOST_SCORES = 1_000, 2**24  # queries, and scores, that are computed at a time
_NO_HURRY_S = 3_600.0  # no request is refused because others wait
_PAIRS_TOGETHER = 64  # scores of all with all are computed for so many pairs at a time, and those of a text with its own partner are kept

Figures = dict[str, dict[str, float]]  # way -> metric -> figure


def evaluate(bundle: Path, task: Retrieval | Pairs, file: VectorFile, weights: Mapping[str, float], show: Show) -> contract.Evaluation:
    """Return the figures of a bundle. `weights` are those of the outputs in `hybrid`. Raises LoadtestError if it is no encoder."""
    manifest = contract.read_manifest(bundle)
    if manifest.kind != "encoder":
        raise LoadtestError(f"{bundle} is of kind {manifest.kind}, which gives no vectors: name the bundle of an encoder")
    show(f"{manifest.name}: loading", None)
    one, other = uvloop.run(vectors_of(bundle, manifest, task, file, show))
    show(f"{manifest.name}: comparing", None)
    if isinstance(task, Pairs):
        figures = of_pairs(manifest, one, other, task, weights)
    else:
        figures = of_retrieval(manifest, one, other, task, weights)
    return contract.Evaluation(
        task=task.name,
        task_sha256=task.sha256,
        licence=task.licence,
        queries=len(task.scores if isinstance(task, Pairs) else task.queries),
        documents=0 if isinstance(task, Pairs) else len(task.documents),
        ways=tuple(contract.WayFigures(way=way.name, spaces=way.spaces, figures=figures[way.name]) for way in ways_of(manifest)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool=", ".join(f"{package} {version(package)}" for package in ("attnserve", "onnxruntime", "numpy")),
    )


async def vectors_of(
    bundle: Path, manifest: contract.Manifest, task: Retrieval | Pairs, file: VectorFile, show: Show
) -> tuple[Texts, Texts]:
    """Return the vectors of the queries and of the documents, or of the first and of the second texts."""
    outputs = [output for output in manifest.outputs if output != "tokens"]
    async with opened(bundle, max_bulk_wait_s=_NO_HURRY_S) as catalog:
        model = catalog.get(manifest.name)
        if isinstance(task, Pairs):
            return (
                await compute(model, task.first, None, outputs, file, show),
                await compute(model, task.second, None, outputs, file, show),
            )
        documents = await compute(model, task.documents, "document", outputs, file, show)
        return await compute(model, task.queries, "query", outputs, file, show), documents


def of_retrieval(manifest: contract.Manifest, queries: Texts, documents: Texts, task: Retrieval, weights: Mapping[str, float]) -> Figures:
    """Return the mean of each metric over all queries, for each way."""
    sums: Figures = defaultdict(lambda: dict.fromkeys(metrics.RETRIEVAL, 0.0))
    for some in _slices(len(task.queries), max(1, min(MOST_QUERIES, MOST_SCORES // len(task.documents)))):
        for way, found in scores(manifest, _part(queries, some), documents, weights):
            for row, relevance in zip(found, task.relevance[some], strict=True):
                for metric, figure in metrics.of_query(metrics.best(row, metrics.DEEPEST), relevance).items():
                    sums[way][metric] += figure
    return {way: {metric: round(total / len(task.queries), 6) for metric, total in figures.items()} for way, figures in sums.items()}


def of_pairs(manifest: contract.Manifest, first: Texts, second: Texts, task: Pairs, weights: Mapping[str, float]) -> Figures:
    """Return the rank correlation with the task's scores, for each way."""
    found: dict[str, list[Array]] = defaultdict(list)
    for some in _slices(len(task.scores), _PAIRS_TOGETHER):
        for way, matrix in scores(manifest, _part(first, some), _part(second, some), weights):
            found[way].append(matrix.diagonal())
    wanted = np.array(task.scores)
    return {way: {"spearman": round(metrics.spearman(np.concatenate(each), wanted), 6)} for way, each in found.items()}


def write(bundle: Path, evaluation: contract.Evaluation) -> None:
    """Add the evaluation to the bundle's manifest, in place of an older one of the same task. The bundle's fingerprint changes with it; its
    embedding spaces stay.
    """
    manifest = contract.read_manifest(bundle)
    others = [each for each in manifest.evaluations or () if each.task != evaluation.task]
    manifest = manifest.model_copy(update={"evaluations": (*others, evaluation)})
    new = bundle.resolve().with_name(f".{bundle.resolve().name}.{os.getpid()}.json")  # not in the bundle, whose files are all listed
    try:
        new.write_text(contract.dump(manifest), encoding="utf-8")
        new.replace(bundle / contract.MANIFEST)
    finally:
        new.unlink(missing_ok=True)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(first, first + step) for first in range(0, size, step))


def _part(texts: Texts, some: slice) -> Texts:
    return {output: vectors[some] for output, vectors in texts.items()}
