"""The queue, its threads and the event loop together, over a session that can be held, broken and read."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from export import contract
from service.encoding import sparse
from service.encoding.cache import VectorCache
from service.encoding.engine import EncoderEngine
from service.encoding.queue import EncoderLimits
from service.encoding.request import EncodeTask
from service.errors import NotReady, Overloaded, RuntimeFailed
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.telemetry.metrics import Metrics, ModelMetrics
from service.tokenization.texts import Encoded
from tests.service.fakes import PATIENCE_S, FakeSession

VECTOR, TOKENS, LOGITS = contract.EMBEDDING, contract.TOKEN_EMBEDDINGS, contract.LOGITS


def make(session: FakeSession, *, cache_bytes: int = 0, ignored_ids: Sequence[int] = (), **limits: Any) -> EncoderEngine:
    limits = {"run_cost_tokens": 16, "tokens_per_s": 1e9, **limits}
    metrics = ModelMetrics(Metrics(), "fake")
    cache = VectorCache(cache_bytes)
    return EncoderEngine(session, fingerprint="f", limits=EncoderLimits(**limits), metrics=metrics, cache=cache, ignored_ids=ignored_ids)


@asynccontextmanager
async def running(session: FakeSession, **limits: Any) -> AsyncIterator[EncoderEngine]:
    engine = make(session, **limits)
    engine.start()
    try:
        yield engine
    finally:
        session.open()
        await engine.stop()


def encode(*inputs: Sequence[int], typed: bool = False) -> list[Encoded]:
    return [Encoded(list(ids), [0] * len(ids) if typed else None, len(ids)) for ids in inputs]


def text(number: int, length: int = 4) -> list[int]:
    return [number] * length


async def busy(engine: EncoderEngine, session: FakeSession) -> "asyncio.Task[Any]":
    """Hold one run at the gate, so that what comes now must queue; its log and count begin anew."""
    session.hold()
    held = asyncio.create_task(engine.run(EncodeTask(inputs=encode(text(0)), outputs=(VECTOR,))))
    await session.entered(1)
    session.forget()
    return held


async def queued(engine: EncoderEngine, *inputs: Sequence[int], **options: Any) -> "asyncio.Task[Any]":
    """A request whose inputs have been put into the queue."""
    task = asyncio.create_task(engine.run(EncodeTask(inputs=encode(*inputs), **{"outputs": (VECTOR,), **options})))
    await asyncio.sleep(0)
    return task


def same(row: object, session: FakeSession, ids: Sequence[int], output: str = VECTOR) -> bool:
    assert isinstance(row, tuple), row
    return np.array_equal(row[0], session.row(output, ids))


async def computed_anew(engine: EncoderEngine, session: FakeSession, ids: Sequence[int]) -> None:
    """An input of which nothing is left in the engine runs once more."""
    session.forget()
    assert same((await engine.run(EncodeTask(inputs=encode(ids), outputs=(VECTOR,))))[0], session, ids)
    assert session.batches == [[ids]]


# Results ---------------------------------------------------------------------------------------------------------------------------------


async def test_rows_come_in_the_order_of_the_inputs_whatever_the_order_of_the_runs() -> None:
    session = FakeSession()
    inputs = [text(1, 3), text(2, 40), text(3, 3), text(4, 90), text(5, 41), text(6, 3)]
    async with running(session, concurrent_runs=2) as engine:
        rows = await engine.run(EncodeTask(inputs=encode(*inputs), outputs=(VECTOR,)))
    assert all(same(row, session, ids) for row, ids in zip(rows, inputs, strict=True))
    assert len(session.batches) > 1


async def test_requests_with_different_outputs_share_a_run() -> None:
    session = FakeSession()
    async with running(session) as engine:
        held = await busy(engine, session)
        vector, tokens = await queued(engine, text(1, 5)), await queued(engine, text(1, 3), outputs=(TOKENS,))
        session.open()
        rows = await asyncio.gather(held, vector, tokens)
    assert session.batches == [[text(1, 5), text(1, 3)]]
    assert session.outputs == [[VECTOR, TOKENS]]
    assert same(rows[1][0], session, text(1, 5))
    assert same(rows[2][0], session, text(1, 3), TOKENS), "token vectors of the input alone, without padding"


async def test_token_types_reach_the_session() -> None:
    session = FakeSession()
    async with running(session) as engine:
        await engine.run(EncodeTask(inputs=[Encoded([1, 2, 3], [0, 0, 1], 3)], outputs=(VECTOR,)))
        await engine.run(EncodeTask(inputs=encode([1, 2]), outputs=(VECTOR,)))
    assert session.type_ids == [[[0, 0, 1]], None]


async def test_a_row_owns_its_memory() -> None:
    async with running(FakeSession()) as engine:
        rows = await engine.run(EncodeTask(inputs=encode(text(1), text(2)), outputs=(VECTOR,)))
    assert all(isinstance(row, tuple) and row[0].base is None for row in rows)


async def test_a_request_whose_deadline_is_shorter_than_the_queue_is_refused_at_once() -> None:
    session = FakeSession()
    async with running(session, tokens_per_s=1 / PATIENCE_S) as engine:
        held = await busy(engine, session)
        began = time.monotonic()
        with pytest.raises(Overloaded) as refused:
            await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,), deadline=began + PATIENCE_S))
        late_s = refused.value.retry_after_s - 3 * PATIENCE_S  # 4 tokens are running, and the time of one is given
        assert -1e-6 < late_s <= time.monotonic() - began
        session.open()
        await held


async def test_an_interactive_request_does_not_wait_for_an_equal_input_in_the_bulk_lane() -> None:
    session = FakeSession()
    async with running(session, max_batch_tokens=4, bulk_delay_s=3600) as engine:
        held = await busy(engine, session)
        bulk = await queued(engine, text(1), text(2), lane=Lane.BULK)
        interactive = await queued(engine, text(2))
        session.open()
        rows = await asyncio.gather(held, bulk, interactive)
        assert session.batches == [[text(2)], [text(1)], [text(2)]]
        assert same(rows[1][1], session, text(2))
        assert same(rows[2][0], session, text(2))
        await computed_anew(engine, session, text(2))


# De-duplication and the cache ------------------------------------------------------------------------------------------------------------


async def test_equal_inputs_in_flight_run_once_and_answer_all() -> None:
    session = FakeSession()
    async with running(session) as engine:
        held = await busy(engine, session)
        tasks = [await queued(engine, text(1), text(1)), await queued(engine, text(1)), await queued(engine, text(0))]
        session.open()
        await held
        rows = [row for task in tasks for row in await task]
    assert session.batches == [[text(1)]], "and 0, which is running, is joined too"
    assert [same(row, session, ids) for row, ids in zip(rows, [text(1)] * 3 + [text(0)], strict=True)] == [True] * 4


async def test_equal_inputs_of_two_tenants_are_two_inputs() -> None:
    session = FakeSession()
    async with running(session) as engine:
        held = await busy(engine, session)
        tasks = [await queued(engine, text(1), tenant=tenant) for tenant in ("acme", "globex", "acme")]
        session.open()
        await asyncio.gather(held, *tasks)
    assert session.batches == [[text(1), text(1)]]


async def dropped_as_joined(engine: EncoderEngine, session: FakeSession, *also: Any) -> "asyncio.Task[Any]":
    """A request for an input that a runtime thread has dropped, and of which the loop does not know yet."""
    held = await busy(engine, session)
    gone, marker = await queued(engine, text(1, 90)), await queued(engine, text(2))
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    joins = asyncio.create_task(engine.run(EncodeTask(inputs=encode(text(1, 90)), outputs=(VECTOR,))))
    for step in also:
        step()
    session.release()
    session.wait(lambda: session.batches == [[text(2)]])  # the loop stands still meanwhile: it hears of the drop after `joins`
    joins.add_done_callback(lambda _: (held, marker))  # keeps them
    return joins


async def test_joining_an_input_in_the_moment_it_is_dropped_queues_it_again() -> None:
    session = FakeSession()
    async with running(session) as engine:
        joins = await dropped_as_joined(engine, session)
        session.open()
        assert same((await joins)[0], session, text(1, 90))
        await computed_anew(engine, session, text(1, 90))


async def test_joining_an_input_in_the_moment_it_is_dropped_and_the_engine_stops_is_an_answer_too() -> None:
    session = FakeSession()
    engine = make(session)
    engine.start()
    stopping: list[asyncio.Task[None]] = []
    joins = await dropped_as_joined(engine, session, lambda: stopping.append(asyncio.create_task(engine.stop())))
    session.open()
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance((await joins)[0], NotReady)
        await stopping[0]


async def test_an_input_seen_before_comes_from_the_cache() -> None:
    session = FakeSession()
    async with running(session, cache_bytes=10_000) as engine:
        first = await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,)))
        seen: list[int] = []
        again = await engine.run(
            EncodeTask(inputs=encode(text(1), text(2)), outputs=(VECTOR,), on_row=lambda index, row: seen.append(index))
        )
    assert session.batches == [[text(1)], [text(2)]]
    assert same(first[0], session, text(1))
    assert same(again[0], session, text(1))
    assert seen == [0, 1]


async def test_one_run_gives_all_outputs_of_an_input_and_each_is_cached_by_itself() -> None:
    session, ids = FakeSession(), [5, 9, 5, 2]
    all_three = (VECTOR, contract.TOKEN_WEIGHTS, contract.MULTIVECTOR)
    async with running(session, cache_bytes=10_000, ignored_ids=[9]) as engine:
        ((vector, weights, matrix),) = await engine.run(EncodeTask(inputs=encode(ids), outputs=all_three))
        parts = await engine.run(EncodeTask(inputs=encode(ids), outputs=(contract.MULTIVECTOR, VECTOR)))
        await engine.run(EncodeTask(inputs=encode(ids), outputs=(VECTOR, contract.POOLED)))
    assert session.outputs == [sorted(all_three), sorted((VECTOR, contract.POOLED))], "only an output that is missing is computed"
    assert np.array_equal(vector, session.row(VECTOR, ids))
    indices, values = sparse.unpacked(weights)
    of_tokens = session.row(contract.TOKEN_WEIGHTS, ids)
    assert indices.tolist() == [2, 5], "ascending, each token id once, without the ignored one"
    assert values.tolist() == [of_tokens[3], max(of_tokens[0], of_tokens[2])]
    assert matrix.dtype == np.float16
    assert np.array_equal(matrix, session.row(contract.MULTIVECTOR, ids).astype(np.float16))
    assert [np.array_equal(*pair) for pair in zip(parts[0], (matrix, vector), strict=True)] == [True, True]


async def test_token_vectors_are_not_cached() -> None:
    """One long text's would push out a thousand vectors."""
    session = FakeSession()
    async with running(session, cache_bytes=1_000_000) as engine:
        for _ in range(2):
            await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(TOKENS,)))
    assert len(session.batches) == 2


async def test_a_run_can_be_asked_for_whatever_the_cache_knows() -> None:
    session = FakeSession()
    async with running(session, cache_bytes=10_000) as engine:
        for _ in range(2):
            await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,), use_cache=False))
    assert len(session.batches) == 2


# Failures --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("no memory"), SystemExit(1), KeyboardInterrupt(), MemoryError()], ids=repr)
async def test_an_error_of_a_run_reaches_exactly_the_inputs_of_its_batch(failure: BaseException) -> None:
    """And the thread lives on, whatever was raised: what is queued would otherwise wait for it for good."""
    session = FakeSession()
    session.failures[0] = failure
    async with running(session) as engine:
        held = await busy(engine, session)
        mixed, other = await queued(engine, text(1), text(2, 90)), await queued(engine, text(3))
        session.open()
        rows = await asyncio.gather(held, mixed, other)
        assert session.batches == [[text(1), text(3)], [text(2, 90)]]
        assert isinstance(rows[1][0], RuntimeFailed)
        assert isinstance(rows[2][0], RuntimeFailed)
        assert rows[1][0] is not rows[2][0], "two requests raise it: each has its own"
        assert same(rows[1][1], session, text(2, 90))
        assert "no memory" not in str(rows[1][0]), "the runtime's words are for the log"
        assert engine.alive


async def test_the_runtimes_own_words_reach_the_log_with_the_traces_of_who_met_them(caplog: pytest.LogCaptureFixture) -> None:
    session = FakeSession()
    session.broken = True
    async with running(session, concurrent_runs=1) as engine:
        asking = [
            await busy(engine, session),
            await queued(engine, text(1)),
            await queued(engine, text(2), traceparent=f"00-{2:032x}-{1:016x}-01"),
        ]
        asking += [await queued(engine, text(number), traceparent=f"00-{number:032x}-{1:016x}-01") for number in range(2, 30)]
        session.open()
        await asyncio.gather(*asking)
    held, failed = [record for record in caplog.records if record.message == "run failed"][:2]
    assert "scripted failure" in caplog.text
    assert not hasattr(held, "trace_ids")
    assert vars(failed)["trace_ids"] == [f"{number:032x}" for number in range(2, 10)], "each once, and not all of a large batch"


CUDA_LOST = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Gemm node. CUDA failure 700: an illegal memory access was "
    "encountered ; GPU=0 ; hostname=node ; file=/onnxruntime_src/onnxruntime/core/providers/cuda/gpu_data_transfer.cc ; line=73 ;"
)


async def test_a_device_that_is_lost_ends_the_threads_and_what_waits_is_told() -> None:
    """Every later call would fail: the health check sees a dead thread, and a new process takes the replica's place."""
    session = FakeSession()
    session.failures[0] = RuntimeError(CUDA_LOST)
    async with running(session, concurrent_runs=2, max_batch_tokens=2) as engine, asyncio.timeout(PATIENCE_S):
        held = await queued(engine, text(1))
        (row,) = await held
        assert isinstance(row, RuntimeFailed)
        while engine.alive:  # noqa: ASYNC110  threads end by themselves
            await asyncio.sleep(0.001)
        with pytest.raises(NotReady, match="another replica"):
            await engine.run(EncodeTask(inputs=encode(text(2)), outputs=(VECTOR,)))


async def test_memory_of_the_device_that_ran_out_is_not_its_end() -> None:
    session = FakeSession()
    session.failures[0] = RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=node ; file=cuda_allocator.cc ; line=1 ;")
    async with running(session) as engine:
        await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,)))
        assert same((await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,))))[0], session, text(1))
        assert engine.alive


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.0, 2.0])
async def test_a_row_that_is_no_vector_is_withheld_and_its_neighbours_are_not(number: float) -> None:
    session = FakeSession()
    session.bad_rows[tuple(text(1))] = number
    async with running(session, cache_bytes=10_000) as engine:
        for _ in range(2):  # the cache has not kept it either
            rows = await engine.run(EncodeTask(inputs=encode(text(1), text(2)), outputs=(VECTOR,)))
            assert isinstance(rows[0], RuntimeFailed)
            assert same(rows[1], session, text(2))
        assert engine.healthy, "one odd row is no sick runtime"


@pytest.mark.parametrize(
    ("output", "number", "leaves"),
    [
        (contract.POOLED, 0.0, False),
        (contract.POOLED, math.nan, False),
        (contract.POOLED, 2.0, True),
        (LOGITS, 0.0, True),
        (LOGITS, math.inf, False),
        (TOKENS, math.nan, False),
        (TOKENS, 0.0, False),
        (TOKENS, 2.0, True),
    ],
)
async def test_each_output_has_its_own_idea_of_a_bad_row(output: str, number: float, leaves: bool) -> None:
    session = FakeSession()
    session.bad_rows[tuple(text(1))] = number
    async with running(session) as engine:
        (row,) = await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(output,)))
    assert isinstance(row, RuntimeFailed) != leaves


class ShortSession(FakeSession):
    """Forgets the last row."""

    def run(self, outputs: Sequence[str], ids: Sequence[list[int]], type_ids: Sequence[list[int]] | None) -> dict[str, Array]:
        return {name: rows[:-1] for name, rows in super().run(outputs, ids, type_ids).items()}


async def test_an_answer_of_the_wrong_shape_is_an_error_and_not_the_end_of_the_thread() -> None:
    async with running(ShortSession()) as engine:
        async with asyncio.timeout(PATIENCE_S):
            rows = await engine.run(EncodeTask(inputs=encode(text(1), text(2)), outputs=(VECTOR,)))
        assert all(isinstance(row, RuntimeFailed) for row in rows)
        assert engine.alive


# Start and stop --------------------------------------------------------------------------------------------------------------------------


async def test_stop_finishes_what_runs_fails_what_waits_and_ends_the_threads() -> None:
    session = FakeSession()
    engine = make(session, concurrent_runs=1)
    engine.start()
    held = await busy(engine, session)
    waiting = await queued(engine, text(1), text(2))
    stopping = asyncio.create_task(engine.stop())
    assert all(isinstance(row, NotReady) for row in await waiting)
    session.open()
    await stopping
    assert same((await held)[0], session, text(0))
    assert session.batches == []
    assert not any(thread.name.startswith("runtime-") for thread in threading.enumerate())
    assert not engine.healthy
    with pytest.raises(NotReady):
        await engine.run(EncodeTask(inputs=encode(text(1)), outputs=(VECTOR,)))


def test_a_run_that_outlives_its_event_loop_ends_quietly() -> None:
    session = FakeSession()
    engine = make(session)

    async def begin() -> None:
        engine.start()
        (await busy(engine, session)).cancel()

    asyncio.run(begin())
    session.open()  # the thread finds no loop to tell; an exception there would fail this test as a warning
    session.wait(lambda: not session.active)
    asyncio.run(engine.stop())
    assert not any(thread.name.startswith("runtime-") for thread in threading.enumerate())


async def test_many_requests_from_everywhere_all_get_their_own_rows() -> None:
    session = FakeSession()
    random = np.random.default_rng(7)
    async with running(session, concurrent_runs=3, cache_bytes=20_000) as engine:

        async def ask(number: int) -> None:
            inputs = [text(int(token), int(length)) for token, length in random.integers(1, 60, (5, 2))]
            task = asyncio.create_task(engine.run(EncodeTask(inputs=encode(*inputs), outputs=(VECTOR,), lane=Lane(number % 2))))
            if number % 7 == 0:
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert all(same(row, session, ids) for row, ids in zip(await task, inputs, strict=True))

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(ask(number) for number in range(400)))
        await engine.stop()
        assert engine.queued_tokens == 0
