"""What crosses arrives as it was, and is plain."""

import math
import time
from typing import Any

import numpy as np
import pytest

from service.encoder_decoder.request import EncoderDecoderRequest
from service.errors import InvalidRequest, NeverFits, NotReady, Overloaded, RuntimeFailed, ServiceError, TokenizationFailed
from service.generation.request import Attention, Delta, GenerationRequest, Grammar, Sampling, TokenLogprob
from service.generation.run import Run
from service.pools import messages, wire
from service.pools.limits import MESSAGE_BYTES
from service.pools.messages import Receiver
from service.pools.replicas import ReplicaLost
from service.pools.wire import pack
from service.runtime.lanes import Lane
from service.telemetry.usage import Usage
from tests.service.pool_fakes import crossed


class Ours(RuntimeFailed):
    """Of a class that `service/errors.py` does not have."""


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (InvalidRequest("too hot", param="temperature"), InvalidRequest),
        (TokenizationFailed("no such id", param="input"), TokenizationFailed),
        (Overloaded("full", retry_after_s=2.5), Overloaded),
        (NotReady("stopping", retry_after_s=0.5), NotReady),
        (ReplicaLost("gone"), NotReady),
        (Ours("no memory"), RuntimeFailed),
    ],
)
def test_an_error_arrives_with_all_it_says(error: ServiceError, arrives_as: type[ServiceError]) -> None:
    arrived = crossed(error)
    assert type(arrived) is arrives_as
    assert (arrived.message, arrived.param, arrived.status, arrived.code) == (error.message, error.param, error.status, error.code)
    assert getattr(arrived, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_a_request_arrives_as_it_was() -> None:
    sampling = Sampling(seed=2**63 - 1, temperature=0.1, logit_bias={3: -100.0, 0: 1.5}, allowed_token_ids=(1, 2))
    request = GenerationRequest(
        prompt=tuple(range(2000)),
        sampling=sampling,
        max_tokens=9,
        stop=("é", "\x00"),
        top_logprobs=0,
        grammar=Grammar(kind="regex", source="a+"),
        lane=Lane.BULK,
    )
    assert wire.unpack_requests(crossed(wire.pack_requests([request, request]))) == [request, request]
    writing = EncoderDecoderRequest(prompt=(1, 2), sampling=sampling, max_tokens=9, n=2, beams=4, attention=True, traceparent="00-1-2-01")
    assert wire.unpack_requests(crossed(wire.pack_requests([writing, writing]))) == [writing, writing]


def test_a_deadline_arrives_as_the_time_that_is_left() -> None:
    deadline = time.monotonic() + 50
    request = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)
    (arrived,) = wire.unpack_requests(wire.pack_requests([request]))
    assert arrived.deadline == pytest.approx(deadline, abs=1)
    assert wire.deadline_in(wire.seconds_left(math.inf)) == math.inf


def test_deltas_arrive_in_the_run_that_waits_for_them() -> None:
    request = GenerationRequest(prompt=(1, 2), sampling=Sampling(seed=0), max_tokens=2)
    runs = [Run(request, Usage(2), lambda run: None) for _ in range(2)]
    delta = Delta("ab", (7, 8), (TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.0))), TokenLogprob(8, -2.0)), "stop", "b")
    prompt_logprobs = [None, TokenLogprob(2, -0.25)]
    attention = Attention((7, 8), np.array([[0.25, 0.75], [1.0, 0.0]], np.float32))
    receiver = Receiver(runs)
    made = messages.RunDelta.of(1, delta, Usage(2, completion_tokens=2, cached_tokens=1))
    before = [*messages.prompt_parts(1, prompt_logprobs), *messages.attention_parts(1, attention)]
    for message in [*before, *messages.in_deltas([made])]:
        receiver.give(crossed(message))
    assert runs[1].take() == delta
    assert list(runs[1].prompt_logprobs) == prompt_logprobs
    assert runs[1].attention is not None
    assert runs[1].attention.token_ids == attention.token_ids
    np.testing.assert_array_equal(runs[1].attention.weights, attention.weights)
    assert (runs[1].usage.completion_tokens, runs[1].usage.cached_tokens) == (2, 1)
    assert runs[0].take() is None


def size_of(message: Any) -> int:
    return len(pack(message))


def test_no_message_is_larger_than_a_process_takes() -> None:
    """The most of each kind: log-probabilities of a long prompt and of many tokens, and arrays of any size."""
    logprob = TokenLogprob(70_000, -1.25, tuple((70_000 + at, -1.25 - at) for at in range(20)), 4)
    parts = list(messages.prompt_parts(0, [None, *[logprob] * 100_000]))
    assert len(parts) > 1
    assert max(map(size_of, parts)) < MESSAGE_BYTES
    deltas = [messages.RunDelta.of(at, Delta("a" * 1000, (7,) * 1000, (logprob,) * 1000), Usage(2)) for at in range(40)]
    made = list(messages.in_deltas(deltas))
    assert len(made) > 1
    assert [each for _, part in made for each in part] == deltas
    assert max(map(size_of, made)) < MESSAGE_BYTES
    rows = [(at, (np.full((at + 1, 1 << 18), at, np.float32), np.array([at], np.int32))) for at in (0, 1, 40, 2)]  # at + 1 megabytes
    pieces, there = wire.Pieces(), dict[int, Any]()
    for kind, *content in wire.rows_in_messages([*rows, (5, RuntimeFailed("no"))]):
        assert size_of(content) < MESSAGE_BYTES
        if kind == "rows":
            there |= dict(crossed(content[0]))
        elif (whole := pieces.join(wire.Piece(*content))) is not None:
            at, output = divmod(content[0], 2)
            there[at] = *there.get(at, ()), whole
            assert len(there[at]) == output + 1
    assert isinstance(there.pop(5), RuntimeFailed)
    assert {at: all(map(np.array_equal, row, there[at])) for at, row in rows} == {0: True, 1: True, 2: True, 40: True}


def test_many_runs_of_a_long_prompt_carry_it_once() -> None:
    prompt = tuple(range(100_000))
    runs = [GenerationRequest(prompt=prompt, sampling=Sampling(seed=seed), max_tokens=5) for seed in range(128)]
    packed = wire.pack_requests(runs)
    assert len(packed) < 1_000_000
    assert wire.unpack_requests(packed) == runs


def test_a_request_that_no_message_holds_is_refused() -> None:
    runs = [GenerationRequest(prompt=(100_000 + at,) * 100_000, sampling=Sampling(seed=0), max_tokens=5) for at in range(60)]
    with pytest.raises(NeverFits, match=r"the most is \d+: send its prompts in parts"):
        wire.pack_requests(runs)
