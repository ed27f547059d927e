"""An engine over a real session of a bundle."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from export import contract
from service.generation.engine import GeneratorEngine, GeneratorLimits
from service.generation.sampling.grammar import Grammars
from service.generation.session import StepSession
from service.generation.text import Vocabulary
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.service.fakes import PATIENCE_S


@asynccontextmanager
async def running(session: StepSession[Any], bundle: Path, *, slots: int, hand_over_s: float = 0.0) -> AsyncIterator[GeneratorEngine]:
    file = bundle / contract.TOKENIZER
    engine = GeneratorEngine(
        session,
        Vocabulary(file),
        eos_token_ids=(),
        grammars=Grammars(file, ()),
        numerics="0",
        limits=GeneratorLimits(
            slots=slots, max_wait_s=PATIENCE_S, max_bulk_wait_s=PATIENCE_S, hand_over_s=hand_over_s
        ),  # else a slow machine would refuse
        metrics=GeneratorMetrics(Metrics(), "b"),
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
