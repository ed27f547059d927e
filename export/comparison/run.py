"""Measures all mechanisms in turn. Every result is saved before the next measurement begins, in one JSON file for each mechanism."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from export.comparison import growth, layer_graph, matrices
from export.comparison.growth import Point
from export.comparison.mechanisms import EVERYTHING, build
from export.errors import ExportError
from models.folders.folder import in_sentences

Begin = Callable[[str], None]  # called with the name of each step

GiB = 2**30
GRAPHS, RESULTS = "graphs", "results"
LENGTHS = tuple(64 * 2**i for i in range(9))  # sequence lengths N in tokens: 64 .. 16,384
STATE_LENGTHS = (64, 128)  # numbers of tokens after which the state's size is measured
MEASURED_BY = (growth, layer_graph, matrices)  # a change in these files makes older figures incomparable


class ComparisonPlan(BaseModel):
    """Sizes and limits of a comparison. Results measured under a different plan are measured again."""

    model_config = ConfigDict(frozen=True)

    d_model: int = Field(default=128, ge=2)
    n_heads: int = Field(default=2, ge=1)
    lengths: tuple[int, ...] = LENGTHS  # ascending
    parity_sizes: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, 300))  # (B, N) compared with torch
    rank_length: int = 64  # N of the matrices whose rank is computed
    rank_widths: tuple[int, ...] = (4, 8, 16, 32)  # widths D_k of a head at which ranks are computed
    width_length: int = 4096  # N of the runs with several values of the option that a mechanism's `examples.varied` names
    seconds: float = Field(default=0.5, gt=0)  # time for which the runs of one length are repeated
    longest_run_s: float = Field(default=60.0, gt=0)  # a length at which one run would take longer is skipped
    memory_bytes: int = Field(default=6 * GiB, gt=0)  # a length at which a run would need more memory is skipped

    @property
    def longest(self) -> int:
        """The largest N that is run or traced."""
        return max(*self.lengths, self.width_length, *(N for _, N in self.parity_sizes), layer_graph.EXAMPLE[1])


class Result(BaseModel):
    """All results of one mechanism. `error` is None until the layer without its growth is measured."""

    name: str
    key: str
    linear_weights: int = 0  # multiply-adds per token in projections
    state_bytes: dict[int, int] = {}  # number of tokens -> bytes of one sequence's state; {} without a state
    error: float | None = None  # largest |onnxruntime - torch| of an output, both in float32
    ranks: dict[int, float] = {}  # width of a head -> effective rank
    layers_to_reach: int = 0  # layers until every output depends on every token; 0: no number is enough
    points: list[Point] = []
    ended: str | None = None  # None: larger N are still to be measured; "": all are measured; else why no larger N is measured
    widths: dict[int, float] = {}  # value of the option `examples.varied` -> seconds of a run at the plan's `width_length`
    failure: str | None = None  # error of the last attempt; the next run tries again

    @property
    def complete(self) -> bool:
        _, values = EVERYTHING[self.name].examples.varied or ("", ())
        return self.error is not None and self.ended is not None and len(self.widths) == len(values) and not self.failure


def key(name: str, plan: ComparisonPlan) -> str:
    """Return a hash of the plan, options, runtime and source code on which a result depends."""
    examples, modules = EVERYTHING[name].examples, (sys.modules[EVERYTHING[name].__module__], *MEASURED_BY)
    told = [plan.model_dump(mode="json"), dict(examples.large), dict(examples.short), examples.varied, ort.__version__]
    return hashlib.sha256(json.dumps([told, *map(inspect.getsource, modules)]).encode()).hexdigest()[:16]


def load(folder: Path, name: str, plan: ComparisonPlan) -> Result:
    """Return the saved result, or an empty one if none is saved or its key differs."""
    wanted, file = key(name, plan), folder / f"{name}.json"
    try:
        found = Result.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:  # not UTF-8, not JSON, or with other fields
        found = None
    return found if found is not None and found.key == wanted else Result(name=name, key=wanted)


def save(folder: Path, result: Result) -> None:
    """Write the file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{result.name}.new"
    new.write_text(result.model_dump_json(indent=1))
    new.rename(folder / f"{result.name}.json")


def run(
    names: Sequence[str], plan: ComparisonPlan, out: Path, progress: Callable[[str, float | None], None] = lambda step, fraction: None
) -> list[Result]:
    """Measure everything that is not measured yet. A repeated call resumes an interrupted one, and retries failures: the error of a
    mechanism is saved as its `failure`, and the others are still measured.

    Raises ExportError if the folder `out` cannot be read or written.
    """
    with in_sentences(f"{out} cannot take the comparison", ExportError):
        found = [load(out / RESULTS, name, plan) for name in names]
        for number, result in enumerate(found):
            if result.complete:
                continue
            result.failure = None
            try:
                _complete(result, plan, out, partial(_show, progress, number / len(names)))
            except Exception as error:
                result.failure = f"{type(error).__name__}: {error}".splitlines()[0]
                save(out / RESULTS, result)
    return found


def _show(progress: Callable[[str, float | None], None], fraction: float, step: str) -> None:
    progress(step, fraction)


def _complete(result: Result, plan: ComparisonPlan, out: Path, begin: Begin) -> None:
    """Run every step that is not done yet, and save the result after each."""
    name, graph = result.name, out / GRAPHS / f"{result.name}.{result.key}.onnx"
    begin(f"{name}: graph")
    layer: Any = build(name, plan.d_model, plan.n_heads, longest=plan.longest)
    if not graph.is_file():
        for old in graph.parent.glob(f"{name}.*.onnx"):  # remove graphs of earlier results, which have another key
            old.unlink()
        _write(layer, graph, plan)
    if result.error is None:
        begin(f"{name}: against torch, and ranks")
        result.linear_weights = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
        result.state_bytes = _state_bytes(layer, plan) if layer.capabilities.causal else {}
        result.ranks = matrices.ranks(name, plan.rank_length, plan.rank_widths, plan.n_heads)
        result.layers_to_reach = matrices.layers_to_reach(name, plan.rank_length, plan.d_model, plan.n_heads)
        result.error = layer_graph.difference(layer, graph, plan.parity_sizes, plan.d_model)
        save(out / RESULTS, result)
    _grow(result, graph, plan, out, begin)
    _vary(result, plan, out, begin)


def _grow(result: Result, graph: Path, plan: ComparisonPlan, out: Path, begin: Begin) -> None:
    """Measure the lengths of the plan in ascending order, until one exceeds the limits."""
    for N in plan.lengths[len(result.points) :]:
        if reason := growth.too_much(result.points, N, memory_bytes=plan.memory_bytes, longest_run_s=plan.longest_run_s):
            result.ended = reason
            break
        begin(f"{result.name}: N = {N:,}")
        try:
            result.points.append(growth.measure(graph, N, d_model=plan.d_model, seconds=plan.seconds))
        except growth.Killed as killed:
            result.ended = str(killed)
            break
        save(out / RESULTS, result)
    result.ended = result.ended or ""
    save(out / RESULTS, result)


def _vary(result: Result, plan: ComparisonPlan, out: Path, begin: Begin) -> None:
    """Measure the cost for each value of the option `examples.varied`, each with a temporary graph."""
    option, values = EVERYTHING[result.name].examples.varied or ("", ())
    for value in values[len(result.widths) :]:
        begin(f"{result.name}: {option} {value}")
        graph = out / GRAPHS / f"{result.name}.{option}.onnx"
        _write(build(result.name, plan.d_model, plan.n_heads, longest=plan.longest, more={option: value}), graph, plan)
        result.widths[value] = growth.measure(graph, plan.width_length, d_model=plan.d_model, seconds=plan.seconds).s
        graph.unlink()
        save(out / RESULTS, result)


def _write(layer: nn.Module, graph: Path, plan: ComparisonPlan) -> None:
    """Write the graph to a temporary file and rename it, so that an interrupted export leaves no partial graph."""
    graph.parent.mkdir(parents=True, exist_ok=True)
    new = graph.with_suffix(".new")
    layer_graph.write(layer, new, d_model=plan.d_model, longest=plan.longest)
    new.rename(graph)


def _state_bytes(layer: nn.Module, plan: ComparisonPlan) -> dict[int, int]:
    """Return the size of one sequence's state after each number of tokens in STATE_LENGTHS."""
    with torch.inference_mode():
        states = {N: layer(torch.zeros(1, N, plan.d_model))[1] for N in STATE_LENGTHS}
    return {N: sum(tensor.numel() * tensor.element_size() for tensor in state.values()) for N, state in states.items()}
