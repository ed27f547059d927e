"""The engine against the searches of `models/encoder_decoder/search.py`, many sources at once; who leaves, who waits, what breaks."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from models.encoder_decoder.search import attended, beam, greedy
from service.encoder_decoder.engine import EncoderDecoderEngine
from service.encoder_decoder.request import EncoderDecoderRequest
from service.errors import DeadlineExceeded, RuntimeFailed
from service.generation.admission import QueueLimits
from service.generation.request import Sampling
from service.generation.run import Run, join
from service.generation.text import Vocabulary
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.encoder_decoders import END, KINDS, random_encoder_decoder
from tests.service.encoder_decoder.torch_session import TorchSession
from tests.service.fakes import PATIENCE_S, set_forward, until
from tests.service.generation.fake_steps import byte_tokenizer

TOLERANCE = 1e-4  # float32 and padding: other sums
SOURCES = ["one", "forty-two", "a thousand and one", "x", "seventeen", "nine hundred"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@asynccontextmanager
async def running(session: TorchSession, vocabulary: Vocabulary, **limits: float) -> AsyncIterator[EncoderDecoderEngine]:
    engine = EncoderDecoderEngine(
        session, vocabulary, limits=QueueLimits(**{"max_wait_s": PATIENCE_S, **limits}), metrics=GeneratorMetrics(Metrics(), "fake")
    )
    engine.start()
    try:
        yield engine
    finally:
        session.open()
        await engine.stop()


def asked(text: str = "forty-two", **fields: Any) -> EncoderDecoderRequest:
    return EncoderDecoderRequest(**{"prompt": tuple(text.encode()), "sampling": Sampling(seed=0), "max_tokens": 100, **fields})


async def written(run: Run) -> list[int]:
    return list(join([delta async for delta in run]).token_ids)


def cut(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def tensors(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([list(text.encode())])
    return ids, torch.ones_like(ids, dtype=torch.bool)


@pytest.mark.parametrize("kind", KINDS)
async def test_all_together_get_what_torch_writes_for_each_alone(kind: str, vocabulary: Vocabulary) -> None:
    """Greedy and beams, of sources of all lengths, that join and leave at different steps."""
    model = random_encoder_decoder(kind)
    session = TorchSession(model)
    async with running(session, vocabulary, slots=16) as engine:
        runs = await engine.open([asked(text, attention=True) for text in SOURCES])
        beams = await engine.open([asked(text, beams=4, n=2) for text in SOURCES])
        got = await asyncio.gather(*map(written, (*runs, *beams)))
    for text, tokens, run in zip(SOURCES, got, runs, strict=False):
        expected, weights = attended(model, *tensors(text))
        assert tokens == cut(expected[0].tolist())
        assert run.attention is not None
        assert list(run.attention.token_ids) == tokens
        np.testing.assert_allclose(run.attention.weights, weights[0, : len(tokens)].numpy(), atol=TOLERANCE)
    for text, first, second in zip(SOURCES, got[len(SOURCES) :: 2], got[len(SOURCES) + 1 :: 2], strict=True):
        assert first == cut(beam(model, *tensors(text), width=4).tokens[0].tolist())
        assert second != first
    assert max(R for R, _ in session.sizes) > 6, "sources are stepped together"


async def test_greedy_tokens_come_one_by_one_and_a_beam_at_its_end(vocabulary: Vocabulary) -> None:
    session = TorchSession(random_encoder_decoder())
    length = len(cut(greedy(session.model, *tensors("forty-two")).tokens[0].tolist()))
    assert length > 2
    async with running(session, vocabulary) as engine:
        session.hold()
        one, other = *(await engine.open([asked()])), *(await engine.open([asked(beams=2)]))
        told: list[bool] = []
        one.listen(told.append)
        other.listen(lambda ended: told.append(ended) if ended else None)
        session.open()
        await until(lambda: told.count(True) == 2)
        deltas = [run.take() for run in (one, other)]
        assert all(delta is not None and delta.finish_reason in ("stop", "length") for delta in deltas)
        assert one.usage.completion_tokens == length


async def test_max_tokens_and_the_models_own_limit_end_an_output(vocabulary: Vocabulary) -> None:
    model = random_encoder_decoder()
    with torch.no_grad():
        model.to_logits.bias[END] = -100  # never ends by itself
    async with running(TorchSession(model), vocabulary) as engine:
        for max_tokens, length in ((3, 3), (100, 7)):
            (run,) = await engine.open([asked(max_tokens=max_tokens)])
            end = join([delta async for delta in run])
            assert (len(end.token_ids), end.finish_reason) == (length, "length")


async def test_who_leaves_makes_room_and_changes_nothing_for_the_others(vocabulary: Vocabulary) -> None:
    session = TorchSession(random_encoder_decoder())
    want = cut(greedy(session.model, *tensors("seventeen")).tokens[0].tolist())
    async with running(session, vocabulary, slots=2) as engine:
        session.hold()
        gone, stays = (await engine.open([asked("a thousand and one")]))[0], (await engine.open([asked("seventeen")]))[0]
        waits = (await engine.open([asked("seventeen")]))[0]
        assert await asyncio.to_thread(session.arrived.wait, PATIENCE_S)
        gone.cancel()
        session.open()
        assert await written(stays) == want
        assert await written(waits) == want
        assert gone.usage.completion_tokens <= 1
    assert session.sizes[-1][1] == len("seventeen"), "no wider than the longest that is left"


async def test_a_beam_counts_with_all_its_rows(vocabulary: Vocabulary) -> None:
    """For who scales: eight rows of which two beams of four are followed are all taken."""
    session = TorchSession(random_encoder_decoder())
    async with running(session, vocabulary, slots=8) as engine:
        session.hold()
        runs = await engine.open([asked(beams=4), asked(beams=4), asked(beams=2, n=2)])
        assert await asyncio.to_thread(session.arrived.wait, PATIENCE_S)
        assert engine.pending == 1.25 * engine.limits.slots
        assert [sample.value for metric in engine.metrics.running.collect() for sample in metric.samples] == [8]
        session.open()
        await asyncio.gather(*map(written, runs))
        assert engine.pending == 0


async def test_a_deadline_ends_who_waits_and_who_runs(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    session = TorchSession(random_encoder_decoder())
    async with running(session, vocabulary, slots=1) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.open([asked(deadline=time.monotonic())])
        session.hold()
        deadline = time.monotonic() + PATIENCE_S
        runs = [(await engine.open([asked(deadline=deadline, attention=True)]))[0] for _ in range(2)]
        assert await asyncio.to_thread(session.arrived.wait, PATIENCE_S)
        set_forward(monkeypatch)(PATIENCE_S)
        session.open()
        made = join([delta async for delta in runs[0]])
        assert (len(made.token_ids), made.finish_reason) == (1, "length")
        assert runs[0].attention is not None
        assert runs[0].attention.token_ids == made.token_ids
        with pytest.raises(DeadlineExceeded):
            await written(runs[1])


@pytest.mark.parametrize("broken", [RuntimeError("no memory"), None])
async def test_a_failed_step_belongs_to_those_who_took_part(broken: Exception | None, vocabulary: Vocabulary) -> None:
    session = TorchSession(random_encoder_decoder())
    async with running(session, vocabulary) as engine:
        bias = session.model.to_logits.bias.data
        if broken is None:
            bias[3] = np.nan
        session.error = broken
        (run,) = await engine.open([asked()])
        with pytest.raises(RuntimeFailed):
            await written(run)
        assert not engine.healthy
        session.error, bias[3] = None, 0.0
        await engine.probe(time.monotonic() + PATIENCE_S)
        assert engine.healthy
