"""All mechanisms in turn. Everything that is measured is on disk before the next thing begins."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from export.comparison import growth, layer_graph, matrices, mechanisms, parity, results
from export.comparison.mechanisms import build
from export.comparison.plan import Plan
from export.comparison.results import Result, WidthPoint
from export.errors import ExportError
from models.folders.folder import in_sentences

Progress = Callable[[str, float | None], None]

GRAPHS, RESULTS = "graphs", "results"
STATE_LENGTHS = (64, 128)  # tokens after which the size of a state is taken


def run(names: Sequence[str], plan: Plan, out: Path, progress: Progress = lambda step, fraction: None) -> list[Result]:
    """Measure what is not measured yet. After Ctrl-C or a kill, the same call goes on where it was, and failures are tried again.

    Raises ExportError for a folder `out` that cannot be read or written.
    """
    with in_sentences(f"{out} cannot take the comparison", ExportError):
        return _run(names, plan, out, progress)


def _run(names: Sequence[str], plan: Plan, out: Path, progress: Progress) -> list[Result]:
    found = [results.load(out / RESULTS, name, plan) for name in names]
    for number, result in enumerate(found):
        if not result.complete:
            _attempt(result, plan, out, partial(_tell, progress, number / len(names)))
    return found


def _tell(progress: Progress, fraction: float, step: str) -> None:
    progress(step, fraction)


def _attempt(result: Result, plan: Plan, out: Path, begin: Callable[[str], None]) -> None:
    """A mechanism that cannot be exported or run, for whatever reason, says so on the page; the others are measured all the same."""
    result.failure = None
    try:
        _complete(result, plan, out, begin)
    except Exception as error:
        result.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        results.save(out / RESULTS, result)


def _complete(result: Result, plan: Plan, out: Path, begin: Callable[[str], None]) -> None:
    """Every step that is missing, and the file after each."""
    name = result.name
    graph = out / GRAPHS / f"{name}.{result.key}.onnx"
    begin(f"{name}: graph")
    layer: Any = build(name, plan.d_model, plan.n_heads, longest=plan.longest)
    if not graph.is_file():
        for old in graph.parent.glob(f"{name}.*.onnx"):  # of older keys
            old.unlink()
        _write(layer, graph, plan)
    result.operators = layer_graph.operators(graph)
    result.linear_weights = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
    result.state_bytes = _state_bytes(layer, plan) if layer.capabilities.causal else {}
    if result.parity is None:
        begin(f"{name}: against torch")
        result.parity = parity.differences(layer, graph, plan)
    if result.ranks is None:
        begin(f"{name}: ranks")
        result.ranks = matrices.ranks(name, plan)
    if not result.reach_done:
        result.layers_to_reach, result.reach_done = matrices.layers_to_reach(name, plan), True
    results.save(out / RESULTS, result)
    _grow(result, graph, plan, out, begin)
    _vary(result, plan, out, begin)


def _grow(result: Result, graph: Path, plan: Plan, out: Path, begin: Callable[[str], None]) -> None:
    """All lengths that fit, shortest first."""
    for N in plan.lengths[len(result.points) :]:
        if reason := growth.too_much(result.points, N, plan):
            result.ended = reason
            break
        begin(f"{result.name}: N = {N:,}")
        try:
            result.points.append(growth.measure(result.name, graph, plan, N))
        except growth.Killed as killed:
            result.ended = str(killed)
            break
        results.save(out / RESULTS, result)
    result.ended = result.ended or ""
    results.save(out / RESULTS, result)


def _vary(result: Result, plan: Plan, out: Path, begin: Callable[[str], None]) -> None:
    """The option that its cost depends on beside N, value by value; each has a graph of its own, which goes again."""
    option, values = mechanisms.EVERYTHING[result.name].examples.varied or ("", ())
    for value in values[len(result.widths) :]:
        begin(f"{result.name}: {option} {value}")
        graph = out / GRAPHS / f"{result.name}.{option}.onnx"
        _write(build(result.name, plan.d_model, plan.n_heads, longest=plan.longest, more={option: value}), graph, plan)
        point = growth.measure(result.name, graph, plan.model_copy(update={"runtime": "onnxruntime"}), plan.width_length)
        graph.unlink()
        result.widths.append(WidthPoint(value=value, s=point.s))
        results.save(out / RESULTS, result)


def _write(layer: nn.Module, graph: Path, plan: Plan) -> None:
    """Beside its place first: an interrupted export leaves no half a graph there."""
    graph.parent.mkdir(parents=True, exist_ok=True)
    new = graph.with_suffix(".new")
    layer_graph.write(layer, new, d_model=plan.d_model, longest=plan.longest)
    new.rename(graph)


def _state_bytes(layer: nn.Module, plan: Plan) -> dict[int, int]:
    """Of one sequence, after so many tokens."""
    found = {}
    for N in STATE_LENGTHS:
        with torch.inference_mode():
            _, state = layer(torch.zeros(1, N, plan.d_model))
        found[N] = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return found
