"""Models that are built before the rounds begin, and the reasons why some could not be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from export import contract
from loadtest.bench.generation.plan import GenerationPart, GenerationPlan

if TYPE_CHECKING:  # they import torch, which a service does not need and a load test of one neither
    from loadtest.in_process.decoders import Pair
    from loadtest.in_process.gpt2 import Gpt2

NEW_TOKENS = 256  # of each text that transformers generates
# The contestants of each part that are built here.
NEEDED: dict[GenerationPart, tuple[str, ...]] = {
    GenerationPart.flat: ("bundle's twin",),
    GenerationPart.transformers: ("transformers",),
    GenerationPart.paper: ("ours", "twin"),
    GenerationPart.batches: ("ours", "twin"),
}
NO_CHECKPOINT = "not measured without --checkpoint, the folder that the bundle was made of"


@dataclass
class Contestants:
    """Besides the bundle itself."""

    twin: Path | None = None  # the graph of the bundle's decoder with softmax layers
    gpt2: "Gpt2 | None" = None
    paper: dict[str, "Pair"] = field(default_factory=dict)  # by the name of the shape
    left_out: dict[str, str] = field(default_factory=dict)  # why, by the name of the contestant


def build(plan: GenerationPlan, checkpoint: Path | None, folder: Path, show: Callable[[str], None]) -> Contestants:
    """What the plan's parts need, as files in `folder`. Raises LoadtestError when the checkpoint is of another model."""
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
    """What has the shape of the bundle's decoder."""
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
    """The first of them that is not installed."""
    return next((package for package in packages if find_spec(package) is None), "")
