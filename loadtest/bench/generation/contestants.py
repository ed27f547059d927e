"""The options of `attnserve bench-generate`, and the models that it builds before its rounds begin. If a model cannot be built, the reason
is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from export import contract
from loadtest.in_process.shapes import ModelShape

if TYPE_CHECKING:  # these modules import torch, which neither the service nor its load tests need
    from loadtest.in_process.decoders import Pair
    from loadtest.in_process.gpt2 import Gpt2


class GenerationPart(StrEnum):
    engine = "engine"
    service = "service"
    prefill = "prefill"
    latency = "latency"
    sharing = "sharing"
    transformers = "transformers"
    paper = "paper"
    batches = "batches"
    flat = "flat"


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The options of the benchmark. `seconds`: length of one measurement. `slots`: runs of the engine at a time. `tokens`: length of the
    long sequence. `memory_bytes`: limit on the states or KV caches of a batch."""

    bundle: Path
    model: str
    seconds: float
    slots: int
    tokens: int
    threads: int
    parts: frozenset[GenerationPart]
    shapes: tuple[ModelShape, ...]
    memory_bytes: int


NEW_TOKENS = 256  # number of tokens of each text that transformers generates
# Part of the benchmark -> names of the contestants that it needs and that `build` must make.
NEEDED: dict[GenerationPart, tuple[str, ...]] = {
    GenerationPart.flat: ("bundle's twin",),
    GenerationPart.transformers: ("transformers",),
    GenerationPart.paper: ("ours", "twin"),
    GenerationPart.batches: ("ours", "twin"),
}
NO_CHECKPOINT = "not measured without --checkpoint, the folder that the bundle was made of"


@dataclass
class Contestants:
    """The models to compare with the bundle."""

    twin: Path | None = None  # ONNX graph of the bundle's decoder with softmax attention instead of its own
    gpt2: "Gpt2 | None" = None
    paper: dict[str, "Pair"] = field(default_factory=dict)  # name of a shape in shapes.py -> the two models of this shape
    left_out: dict[str, str] = field(default_factory=dict)  # name of a contestant that could not be built -> reason


def build(plan: GenerationPlan, checkpoint: Path | None, folder: Path, show: Callable[[str], None]) -> Contestants:
    """Build the models that the plan's parts need, in `folder`. Raises LoadtestError if the bundle was not made of the checkpoint."""
    made = Contestants()
    asked = plan.parts & set(NEEDED)
    if absent := _absent("torch", "onnx", "onnxscript"):
        names = [name for part, found in NEEDED.items() if part in asked for name in found]
        made.left_out = dict.fromkeys(names, f"{absent} is not installed: pip install 'attnserve[export]'")
        return made
    if asked & {GenerationPart.paper, GenerationPart.batches}:
        from loadtest.in_process.decoders import build_pair

        for shape in plan.shapes:
            show(f"export of the {shape.name} shape and its twin")
            made.paper[shape.name] = build_pair(shape, folder / shape.name)
    if asked & {GenerationPart.flat, GenerationPart.transformers}:
        _build_like(plan, checkpoint, folder, show, made)
    return made


def _build_like(plan: GenerationPlan, checkpoint: Path | None, folder: Path, show: Callable[[str], None], made: Contestants) -> None:
    """Build the models that have the shape of the bundle's decoder, and write them into `made`."""
    if checkpoint is None:
        parts = plan.parts & {GenerationPart.flat, GenerationPart.transformers}
        made.left_out |= {name: NO_CHECKPOINT for part in parts for name in NEEDED[part]}
        return
    from loadtest.in_process.decoders import build_twin, config_of

    config = config_of(checkpoint, contract.read_manifest(plan.bundle))
    if GenerationPart.flat in plan.parts:
        show("export of the twin")
        made.twin = build_twin(config, (plan.bundle / contract.TOKENIZER).read_text(encoding="utf-8"), folder / "twin")
    if GenerationPart.transformers in plan.parts:
        if _absent("transformers"):
            made.left_out["transformers"] = "transformers is not installed: pip install 'attnserve[test]'"
        else:
            from loadtest.in_process.gpt2 import Gpt2

            made.gpt2 = Gpt2(config, NEW_TOKENS)


def _absent(*packages: str) -> str:
    """Return the name of the first package that is not installed, or an empty text."""
    return next((package for package in packages if find_spec(package) is None), "")
