"""Limits of a tenant on a clock of the test's own, and what OpenAI's headers say of them."""

import time

import pytest

from service.call import Call
from service.errors import RateLimited
from service.http.tenants import Rate, Tenant, TenantLimits, duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tenant(clock: Clock, **limits: object) -> Tenant:
    made = Tenant("acme", clock=clock)
    made.limit(TenantLimits(**limits))  # type: ignore[arg-type]
    return made


def used(tokens: int = 0, completion_tokens: int = 0, model: str = "mini") -> Call:
    return Call("id", time.monotonic(), model=model, tokens=tokens, completion_tokens=completion_tokens)


def told(of: Tenant) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in of.headers()}


def test_requests_flow_at_the_rate_and_burst_up_to_the_limit(clock: Clock) -> None:
    acme = tenant(clock, requests=Rate(60, 60.0))
    for _ in range(60):
        acme.admit()
    for waited_s in (0.0, 0.5):
        clock.now += waited_s
        with pytest.raises(RateLimited, match=r"tenant acme.* 60 a minute of requests") as refused:
            acme.admit()
        assert refused.value.retry_after_s == pytest.approx(1 - waited_s)
    clock.now += 0.5
    acme.admit()
    clock.now += 3600
    for _ in range(60):
        acme.admit()
    with pytest.raises(RateLimited):
        acme.admit()


def test_a_refused_request_costs_nothing(clock: Clock) -> None:
    """However often it is sent, there is room again when the answer said so."""
    acme = tenant(clock, requests=Rate(1, 1.0), tokens=Rate(10, 1.0))
    acme.admit()
    for _ in range(100):
        with pytest.raises(RateLimited):
            acme.admit()
    clock.now += 1
    acme.admit()
    acme.settle(used(tokens=10), 200)
    clock.now += 0.05
    with pytest.raises(RateLimited, match="of requests"):
        acme.admit()
    assert told(acme)["remaining-requests"] == "0"


def test_tokens_are_charged_when_they_were_used_and_a_debt_is_paid_by_time(clock: Clock) -> None:
    acme = tenant(clock, tokens=Rate(100, 1.0))
    acme.admit()
    call = used(tokens=250)
    acme.charge(call)
    acme.settle(call, 200)  # not twice
    assert told(acme) == {"limit-tokens": "100", "remaining-tokens": "0", "reset-tokens": "2.5s"}
    with pytest.raises(RateLimited) as refused:
        acme.admit()
    assert refused.value.retry_after_s == pytest.approx(1.51)
    clock.now += 1.51
    acme.admit()


async def test_streams_are_counted_while_they_last(clock: Clock) -> None:
    acme = tenant(clock, streams=2)
    calls = [used(), used()]
    for call in calls:
        await acme.begin_stream(call)
    with pytest.raises(RateLimited, match="its limit is 2 open streams"):
        await acme.begin_stream(refused := used())
    acme.settle(refused, 429)  # never one of them
    assert acme.streams == 2
    acme.settle(calls[0], 499)
    await acme.begin_stream(used())
    assert told(acme) == {}, "OpenAI has no header for it"


def test_a_new_limit_keeps_what_was_used(clock: Clock) -> None:
    acme = tenant(clock, requests=Rate(10, 60.0))
    for _ in range(10):
        acme.admit()
    acme.limit(TenantLimits(requests=Rate(100, 60.0)))
    with pytest.raises(RateLimited):
        acme.admit()
    acme.limit(TenantLimits(requests=Rate(5, 60.0)))
    clock.now += 3600
    assert told(acme)["remaining-requests"] == "5"
    acme.limit(TenantLimits())
    assert told(acme) == {}
    acme.admit()


def test_usage_is_what_models_answered(clock: Clock) -> None:
    acme = tenant(clock)
    acme.settle(used(7, 3), 200)
    acme.settle(used(5, 1, "other-model"), 499)  # it left in the middle, and has had tokens
    acme.settle(used(0), 400)
    acme.settle(used(9, model=""), 200)
    assert {name: (u.requests, u.prompt_tokens, u.completion_tokens) for name, u in acme.usage.items()} == {
        "mini": (1, 4, 3),
        "other-model": (1, 4, 1),
    }


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (0.0171, "18ms"), (1, "1s"), (1.25, "1.25s"), (59.9999, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"), (0.9999, "1s")],
)
def test_durations_are_openais(seconds: float, said: str) -> None:
    assert duration(seconds) == said
