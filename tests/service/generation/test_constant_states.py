"""Every layer whose state has a constant size runs in the engine as it is: one bundle with a block of each."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from export import contract
from models.layers import LAYERS
from service.generation.engine import GeneratorEngine
from service.generation.request import GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.session import OnnxStepSession
from tests.decoders import EVERY_CONSTANT_STATE
from tests.service.generation import real_engine

N_RUNS = 17
TOKENS = 24


def running(bundle: Path) -> AbstractAsyncContextManager[GeneratorEngine]:
    session = OnnxStepSession(bundle, contract.read_manifest(bundle), threads=2)
    return real_engine.running(session, bundle, slots=N_RUNS)


def asked(number: int) -> GenerationRequest:
    """Prompts of 1, 8, 15 .. tokens."""
    prompt = tuple((number + at) % 256 for at in range(1 + 7 * number))
    return GenerationRequest(prompt=prompt, sampling=Sampling(seed=number), max_tokens=TOKENS)


async def tokens_of(run: Run) -> list[int]:
    return [token_id async for delta in run for token_id in delta.token_ids]


def test_the_bundle_has_every_such_layer() -> None:
    every = {name for name, layer in LAYERS.items() if layer.capabilities.state == "constant"}
    assert set(EVERY_CONSTANT_STATE["layers"]) == every - {"sink_window", "causal_hybrid"}, (
        "whose states are updated in place: test_window.py"
    )


async def test_the_tokens_are_the_same_alone_and_among_others(constant_states_bundle: Path) -> None:
    async with running(constant_states_bundle) as engine:
        together = await asyncio.gather(*(tokens_of(engine.submit(asked(number))) for number in range(N_RUNS)))
        alone = [await tokens_of(engine.submit(asked(number))) for number in (0, 3, N_RUNS - 1)]
    assert alone == [together[0], together[3], together[-1]]
    assert all(len(tokens) == TOKENS for tokens in together)
