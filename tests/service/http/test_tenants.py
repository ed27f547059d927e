"""Limits of a tenant on a clock of the test's own, and what OpenAI's headers say of them."""

import time

import pytest

from service.call import Call
from service.errors import RateLimited
from service.http.tenants import Rate, Tenant, TenantLimits, duration
from tests.service.states.conftest import Clock, clock

__all__ = ("clock",)  # a fixture


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


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (0.0171, "18ms"), (1, "1s"), (1.25, "1.25s"), (59.9999, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"), (0.9999, "1s")],
)
def test_durations_are_openais(seconds: float, said: str) -> None:
    assert duration(seconds) == said
