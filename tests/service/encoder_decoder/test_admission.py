"""Who waits for rows, who goes first and who is refused, played through with given times."""

import pytest

from service.encoder_decoder.batch import Source
from service.encoder_decoder.engine import SourceAdmission
from service.encoder_decoder.request import EncoderDecoderRequest
from service.encoder_decoder.search import Search
from service.errors import Overloaded, QueueTooLong
from service.generation.admission import Holding, QueueLimits
from service.generation.request import Sampling
from service.generation.submission import Submission
from service.runtime.lanes import Lane


def request(client: str, now: float, *, sources: int = 1, beams: int = 1, lane: Lane = Lane.INTERACTIVE) -> Submission[Source]:
    submission = Submission[Source](client, lane, now, now)
    for _ in range(sources):
        one = EncoderDecoderRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=5, beams=beams, lane=lane, client=client)
        search = Search(beams=beams, length=1, max_tokens=5, begin_token_id=0, end_token_id=1, top_logprobs=None)
        submission.fresh.append(Source(one, [], search, submission))
    return submission


def put(waiting: SourceAdmission, submission: Submission[Source], *, free: int = 0, job_s: float = 1.0) -> list[str]:
    """Clients whose sources lost their place to it."""
    slots, first = waiting._limits.slots, submission.fresh[0].slots
    holding = Holding(slots, {"": slots - free}, job_s)
    waiting.check(submission.client, submission.lane, submission.submitted, holding, first)
    return [each.client for each in waiting.queue(submission, retry_after_s=job_s) for _ in each.fresh]


def turns(waiting: SourceAdmission, now: float, n: int) -> list[str]:
    taken: list[Source] = []
    for _ in range(n):
        turn = waiting.turn(now, taken, free=1000)
        assert turn is not None
        taken.append(turn.job)
    return [source.submission.client for source in taken]


def test_rows_go_round_by_client_and_then_by_request() -> None:
    waiting = SourceAdmission(QueueLimits(slots=4, max_wait_s=1000))
    put(waiting, request("a", 0.0, sources=5))
    put(waiting, request("b", 0.1, sources=2))
    small = request("a", 0.2)
    put(waiting, small)
    assert turns(waiting, 0.3, 4) == ["a", "b", "a", "b"]
    assert small.begun, "the second of a's rows is its other request's"
    assert turns(waiting, 0.3, 4) == ["a"] * 4
    assert waiting.turn(0.3, [], free=1) is None


def test_who_would_wait_too_long_is_refused_by_what_is_before_it() -> None:
    """A client with much in the queue is refused, another one is not: its turn comes sooner."""
    waiting = SourceAdmission(QueueLimits(slots=2, max_wait_s=1.0))
    put(waiting, request("many", 0.0, sources=50))
    with pytest.raises(QueueTooLong, match=r"needs about 25\.50 s"):
        put(waiting, request("many", 0.1))
    put(waiting, request("one", 0.1))
    assert turns(waiting, 0.2, 2) == ["many", "one"]
    with pytest.raises(QueueTooLong):
        put(waiting, request("late", 0.3), job_s=3.0)


def test_a_full_queue_is_shared_too() -> None:
    """Its longest client gives up its last request for one that has less in it, and is refused itself."""
    waiting = SourceAdmission(QueueLimits(slots=2, max_waiting=4, max_wait_s=1000))
    put(waiting, request("many", 0.0, sources=2))
    put(waiting, request("many", 0.1, sources=2))
    with pytest.raises(Overloaded, match="4 requests with 2 prompt tokens wait, and the most is 4 requests"):
        put(waiting, request("many", 0.2))
    assert put(waiting, request("one", 0.3)) == ["many", "many"]
    assert len(waiting) == 3
