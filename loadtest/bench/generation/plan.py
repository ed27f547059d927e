"""The options of a run of `attnserve bench-generate`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loadtest.in_process.shapes import ModelShape


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
    """`tokens` is the length of the one long sequence, `memory_bytes` what the states or caches of a batch may take."""

    bundle: Path
    model: str
    seconds: float
    slots: int
    tokens: int
    threads: int
    parts: frozenset[GenerationPart]
    shapes: tuple[ModelShape, ...]
    memory_bytes: int
