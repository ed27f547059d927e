"""What crosses arrives as it was, and is plain."""

import math
import time

import numpy as np
import pytest

from service.batching import Lane
from service.errors import InvalidRequest, NotReady, Overloaded, RuntimeFailed, ServiceError, TokenizationFailed
from service.generation.request import Attention, Delta, GenerationRequest, Grammar, Sampling, TokenLogprob, Usage
from service.generation.run import Run
from service.pools import wire
from service.pools.client import ReplicaLost
from service.tokenization import Encoded
from service.writing.request import WritingRequest
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
    arrived = wire.unpack_error(crossed(wire.pack_error(error)))
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
    writing = WritingRequest(prompt=(1, 2), sampling=sampling, max_tokens=9, n=2, beams=4, attention=True, traceparent="00-1-2-01")
    assert wire.unpack_requests(crossed(wire.pack_requests([writing, writing]))) == [writing, writing]


def test_a_deadline_arrives_as_the_time_that_is_left() -> None:
    deadline = time.monotonic() + 50
    request = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=1, deadline=deadline)
    (arrived,) = wire.unpack_requests(wire.pack_requests([request]))
    assert arrived.deadline == pytest.approx(deadline, abs=1)
    assert wire.deadline_in(wire.seconds_left(math.inf)) == math.inf


def test_inputs_arrive_as_they_were() -> None:
    inputs = [Encoded([1, 200_000], None, 2), Encoded([5, 6, 7], [0, 1, 1], 3)]
    assert wire.unpack_inputs(crossed(wire.pack_inputs(inputs))) == inputs


def test_deltas_arrive_in_the_run_that_waits_for_them() -> None:
    request = GenerationRequest(prompt=(1, 2), sampling=Sampling(seed=0), max_tokens=2)
    runs = [Run(request, Usage(2), lambda run: None) for _ in range(2)]
    delta = Delta("ab", (7, 8), (TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.0))), TokenLogprob(8, -2.0)), "stop", "b")
    prompt_logprobs = [None, TokenLogprob(2, -0.25)]
    attention = Attention((7, 8), np.array([[0.25, 0.75], [1.0, 0.0]], np.float32))
    made = wire.pack_made(1, delta, Usage(2, completion_tokens=2, cached_tokens=1), prompt_logprobs, attention)
    wire.unpack_made(crossed(made), runs)
    assert runs[1].take() == delta
    assert runs[1].prompt_logprobs == prompt_logprobs
    assert runs[1].attention is not None
    assert runs[1].attention.token_ids == attention.token_ids
    np.testing.assert_array_equal(runs[1].attention.weights, attention.weights)
    assert (runs[1].usage.completion_tokens, runs[1].usage.cached_tokens) == (2, 1)
    assert runs[0].take() is None
