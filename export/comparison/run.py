"""Measures all mechanisms in turn. Every result is saved before the next measurement begins."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from export.comparison import growth, layer_graph, matrices, mechanisms, parity, results
from export.comparison.mechanisms import build
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Result, WidthPoint
from export.errors import ExportError
from models.folders.folder import in_sentences

Progress = Callable[[str, float | None], None]

GRAPHS, RESULTS = "graphs", "results"
STATE_LENGTHS = (64, 128)  # numbers of tokens after which the state's size is measured


def run(names: Sequence[str], plan: ComparisonPlan, out: Path, progress: Progress = lambda step, fraction: None) -> list[Result]:
    """Measure everything that is not measured yet. A repeated call resumes an interrupted one, and retries failures.

    Raises ExportError if the folder `out` cannot be read or written.
    """
    with in_sentences(f"{out} cannot take the comparison", ExportError):
        return _run(names, plan, out, progress)


def _run(names: Sequence[str], plan: ComparisonPlan, out: Path, progress: Progress) -> list[Result]:
    found = [results.load(out / RESULTS, name, plan) for name in names]
    for number, result in enumerate(found):
        if not result.complete:
            _attempt(result, plan, out, partial(_report_progress, progress, number / len(names)))
    return found


def _report_progress(progress: Progress, fraction: float, step: str) -> None:
    progress(step, fraction)


def _attempt(result: Result, plan: ComparisonPlan, out: Path, begin: Callable[[str], None]) -> None:
    """Measure one mechanism. Any error is saved as its `failure`, so that the other mechanisms are still measured."""
    result.failure = None
    try:
        _complete(result, plan, out, begin)
    except Exception as error:
        result.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        results.save(out / RESULTS, result)


def _complete(result: Result, plan: ComparisonPlan, out: Path, begin: Callable[[str], None]) -> None:
    """Run every step that is not done yet, and save the result after each."""
    name = result.name
    graph = out / GRAPHS / f"{name}.{result.key}.onnx"
    begin(f"{name}: graph")
    layer: Any = build(name, plan.d_model, plan.n_heads, longest=plan.longest)
    if not graph.is_file():
        for old in graph.parent.glob(f"{name}.*.onnx"):  # remove graphs of earlier results, which have another key
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


def _grow(result: Result, graph: Path, plan: ComparisonPlan, out: Path, begin: Callable[[str], None]) -> None:
    """Measure the lengths of the plan in ascending order, until one exceeds the limits."""
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


def _vary(result: Result, plan: ComparisonPlan, out: Path, begin: Callable[[str], None]) -> None:
    """Measure the cost for each value of the option `examples.varied`, each with a temporary graph."""
    option, values = mechanisms.EVERYTHING[result.name].examples.varied or ("", ())
    for value in values[len(result.widths) :]:
        begin(f"{result.name}: {option} {value}")
        graph = out / GRAPHS / f"{result.name}.{option}.onnx"
        _write(build(result.name, plan.d_model, plan.n_heads, longest=plan.longest, more={option: value}), graph, plan)
        point = growth.measure(result.name, graph, plan.model_copy(update={"runtime": "onnxruntime"}), plan.width_length)
        graph.unlink()
        result.widths.append(WidthPoint(value=value, s=point.s))
        results.save(out / RESULTS, result)


def _write(layer: nn.Module, graph: Path, plan: ComparisonPlan) -> None:
    """Write the graph to a temporary file and rename it, so that an interrupted export leaves no partial graph."""
    graph.parent.mkdir(parents=True, exist_ok=True)
    new = graph.with_suffix(".new")
    layer_graph.write(layer, new, d_model=plan.d_model, longest=plan.longest)
    new.rename(graph)


def _state_bytes(layer: nn.Module, plan: ComparisonPlan) -> dict[int, int]:
    """Return the size of one sequence's state after each number of tokens in STATE_LENGTHS."""
    found = {}
    for N in STATE_LENGTHS:
        with torch.inference_mode():
            _, state = layer(torch.zeros(1, N, plan.d_model))
        found[N] = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return found
