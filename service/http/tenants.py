"""Limits the requests and tokens of tenants, and counts their usage.

Each limit on requests or tokens is a token bucket: a limit of 600 a minute is a bucket of size 600 that fills at 10 a second. The tokens
of a request are charged after its answer, when they are known. A request is admitted if at least one token is left, so a large answer may
make the level negative. Then requests are refused until the level is at least 1 again. Limits and counts are those of one process: each
gateway of a cluster has its own (docs/keys.md).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from service.errors import RateLimited

if TYPE_CHECKING:
    from service.call import Call
    from service.telemetry.metrics import TenantMetrics

_ALMOST = 1e-9  # a smaller difference, in requests or tokens, is a rounding error
_STREAM_RETRY_S = 1.0  # seconds until a client should retry: a guess, since the end of a stream cannot be predicted


class Rate(NamedTuple):
    """A rate: `most` requests or tokens in `period_s` seconds."""

    most: int
    period_s: float

    def __str__(self) -> str:
        return f"{self.most} a {'minute' if self.period_s == 60 else 'second'}"


class TenantLimits(NamedTuple):
    """The limits of one tenant on requests, tokens and simultaneous streams. None means no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    streams: int | None = None


class Bucket:
    """A token bucket. It is full at first, and fills at its rate up to `rate.most`. Its level may be below 0."""

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._level = float(rate.most)
        self._at = now

    def level(self, now: float) -> float:
        self._level = min(self._level + (now - self._at) * self.rate.most / self.rate.period_s, self.rate.most)
        self._at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount

    def until_s(self, level: float, now: float) -> float:
        """Return the seconds until the bucket's level is at least `level`, or 0 if it is now."""
        missing = level - self.level(now)
        return missing * self.rate.period_s / self.rate.most if missing > _ALMOST else 0.0

    def of(self, rate: Rate, now: float) -> "Bucket":
        """Return a bucket with another rate and with this bucket's level, reduced to the new rate's limit if it is higher."""
        bucket = Bucket(rate, now)
        bucket._level = min(self.level(now), bucket._level)
        return bucket


@dataclass(slots=True)
class UsageCounts:
    """The numbers of requests and tokens of one tenant, for one model."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Tenant:
    """A tenant with its limits and its usage. Its buckets and usage do not change when the file of keys is read again. Use it on the event
    loop only."""

    def __init__(self, name: str, *, client: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.client = client or f"tenant:{name}"  # the tenant's name among the clients that share queues, slots and memory
        self.since_s = int(time.time())
        self.usage: dict[str, UsageCounts] = {}  # model -> counts
        self.streams = 0
        self.metrics: TenantMetrics | None = None
        self.limits = TenantLimits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._clock = clock

    def limit(self, limits: TenantLimits) -> None:
        """Replace the tenant's limits."""
        if limits != self.limits:
            now = self._clock()
            self._requests = _changed(self._requests, limits.requests, now)
            self._tokens = _changed(self._tokens, limits.tokens, now)
            self.limits = limits

    def admit(self) -> None:
        """Take one request from the bucket of requests. Raises RateLimited, and takes nothing, if the bucket of requests or of tokens is
        empty."""
        if self._requests is None and self._tokens is None:
            return
        now = self._clock()
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.until_s(1, now)):
                raise self._refused(f"its limit is {bucket.rate} of {what}: send the request again in {wait_s:.3g} s", wait_s)
        if self._requests is not None:
            self._requests.take(1, now)

    def begin_stream(self, call: "Call") -> None:
        """Count the answer to `call` as an open stream until `settle`. Raises RateLimited if the tenant has too many open streams."""
        if self.limits.streams is not None and self.streams >= self.limits.streams:
            raise self._refused(
                f"{self.streams} of its streams are open, and its limit is {self.limits.streams}: wait until one has ended", _STREAM_RETRY_S
            )
        self.streams += 1
        call.streaming = True

    def charge(self, call: "Call") -> None:
        """Charge the tokens of `call` that were not charged yet."""
        if self._tokens is not None and call.tokens != call.charged:
            self._tokens.take(call.tokens - call.charged, self._clock())
            call.charged = call.tokens

    def settle(self, call: "Call", status: int) -> None:
        """Charge the tokens of an ended request, add the request to the usage, and no longer count its stream as open."""
        self.charge(call)
        self.streams -= call.streaming
        if call.model and (status < 400 or call.tokens):
            usage = self.usage.setdefault(call.model, UsageCounts())
            usage.requests += 1
            usage.prompt_tokens += call.tokens - call.completion_tokens
            usage.completion_tokens += call.completion_tokens
        if self.metrics is not None:
            self.metrics.request(call.tokens - call.completion_tokens, call.completion_tokens)

    @property
    def total(self) -> UsageCounts:
        """Return the usage summed over all models."""
        each = self.usage.values()
        return UsageCounts(sum(u.requests for u in each), sum(u.prompt_tokens for u in each), sum(u.completion_tokens for u in each))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate-limit headers: for each limit that is set, the limit, the remaining amount, and the time until the bucket is
        full."""
        made: list[tuple[bytes, bytes]] = []
        now = self._clock()
        for bucket, what in ((self._requests, b"requests"), (self._tokens, b"tokens")):
            if bucket is not None:
                left = max(math.floor(bucket.level(now) + _ALMOST), 0)
                made += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.rate.most),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, duration(bucket.until_s(bucket.rate.most, now)).encode()),
                ]
        return made

    def _refused(self, why: str, retry_after_s: float) -> RateLimited:
        if self.metrics is not None:
            self.metrics.limited.inc()
        return RateLimited(f"Rate limit reached for tenant {self.name}: {why}", retry_after_s=retry_after_s)


def _changed(bucket: Bucket | None, rate: Rate | None, now: float) -> Bucket | None:
    if rate is None:
        return None
    return Bucket(rate, now) if bucket is None else bucket.of(rate, now)


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's format: `0s`, `20ms`, `1.5s`, `6m0s`, `1h0m0s`. It is rounded up to milliseconds."""
    ms = math.ceil(seconds * 1000 - _ALMOST)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    said = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{said}"
    return f"{minutes}m{said}" if minutes else said
