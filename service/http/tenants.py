"""Limits the requests and tokens of tenants, and counts their usage.

Each limit on requests or tokens is a token bucket: a limit of 600 a minute is a bucket of size 600 that fills at 10 a second. The tokens
of a request are charged after its answer, when they are known. A request is admitted if at least one token is left, so a large answer may
make the level negative. Then requests are refused until the level is at least 1 again.

Gateways that share a store share the buckets (`shared_limits.py`): the bucket is in the store, and each gateway takes from a piece of it.
Without a store the whole bucket is here. While the store is away, this gateway has a share of the limit, as one of those that it has
last known.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from service.errors import RateLimited

if TYPE_CHECKING:
    from service.call import Call
    from service.telemetry.metrics import TenantMetrics

_ALMOST = 1e-9  # a smaller difference, in requests or tokens, is a rounding error
_STREAM_RETRY_S = 1.0  # seconds until a client should retry: a guess, since the end of a stream cannot be predicted
PIECE_S = 0.25  # a piece of a bucket that is nearly empty is what it fills in so many seconds
ASKED_S = 1.0  # longest time, in seconds, between two questions to the store about an empty bucket


class Rate(NamedTuple):
    """A rate: `most` requests or tokens in `period_s` seconds."""

    most: int
    period_s: float

    def __str__(self) -> str:
        return f"{self.most} a {'minute' if self.period_s == 60 else 'second'}"

    @property
    def per_s(self) -> float:
        return self.most / self.period_s

    @property
    def least_piece(self) -> float:
        """Return the smallest useful piece of a bucket with this rate."""
        return max(1.0, self.per_s * PIECE_S)


class TenantLimits(NamedTuple):
    """The limits of one tenant on requests, tokens and simultaneous streams. None means no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    streams: int | None = None


class Bucket:
    """A token bucket, or a piece of one that is in the store. It is full at first. Its level may be below 0.

    It fills at `share` of its rate: 1 for a bucket that is here alone, and 0 for a piece.
    """

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self.share = 1.0
        self.used = 0.0  # taken, and not reported to the store
        self.wanted = False  # whether it was needed lately
        self.ask_at = -math.inf  # time from which the store may be asked for another piece
        self._level = float(rate.most)
        self._at = now
        self._left = 0.0  # what was left in the store's bucket at the time of the last grant
        self._granted = now

    def level(self, now: float) -> float:
        """Return how much may be taken here."""
        filled = self._level + (now - self._at) * self.rate.per_s * self.share
        self._level = min(filled, max(self._level, self.rate.most * self.share))
        self._at = now
        return self._level

    def whole(self, now: float) -> float:
        """Return the level with what is left in the store, as far as it is known here."""
        if self.share:
            return self.level(now)
        return min(self._level + self._left + (now - self._granted) * self.rate.per_s, self.rate.most)

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount
        self.used += amount
        self.wanted = True

    def until_s(self, level: float, now: float) -> float:
        """Return the seconds until `whole` is at least `level`, or 0 if it is now."""
        missing = level - self.whole(now)
        return missing / (self.rate.per_s * (self.share or 1.0)) if missing > _ALMOST else 0.0

    def full_s(self, now: float) -> float:
        """Return the seconds until the bucket is full."""
        return self.until_s(self.rate.most * (self.share or 1.0), now)

    def refused_s(self, now: float) -> float:
        """Return in how many seconds a request that is refused now may be sent again, or 0 if there is something to take."""
        if self.level(now) >= 1 - _ALMOST:
            return 0.0
        self.wanted = True
        return max(self.until_s(1, now), self.ask_at - now if not self.share else 0.0, _ALMOST)

    def must_ask(self, now: float) -> bool:
        """Return whether the store has to be asked for another piece."""
        return not self.share and self.ask_at <= now and self.level(now) < 1 - _ALMOST

    def grant(self, piece: float | None, left: float, reported: float, now: float) -> None:
        """Replace this bucket by a piece of the store's; None: by nothing, because no piece was wanted. `left`: what is left there.
        `reported`: the part of `used` that the store has subtracted."""
        self.used -= reported
        self.share, self._level, self._left = 0.0, (piece or 0.0) - self.used, left
        self._at = self._granted = now
        nothing = piece is not None and piece < 1 - _ALMOST
        self.ask_at = now + min(max(self.until_s(self.rate.least_piece, now), PIECE_S), ASKED_S) if nothing else -math.inf

    def of(self, rate: Rate, now: float) -> "Bucket":
        """Return a bucket with another rate and with this bucket's level, reduced to the new rate's limit if it is higher."""
        bucket = Bucket(rate, now)
        bucket._level = min(self.level(now), bucket._level)
        bucket.share, bucket.used, bucket._left, bucket._granted = self.share, self.used, self._left, self._granted
        return bucket


@dataclass(slots=True)
class UsageCounts:
    """The numbers of requests and tokens of one tenant, for one model."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


UsageByModel = dict[str, UsageCounts]


@dataclass(frozen=True)
class Report:
    """What a tenant has used at one gateway since the report before. The store counts a report with an `id` that it knows only once."""

    id: str
    taken: Mapping[str, float] = field(default_factory=dict)  # "requests" and "tokens"
    usage: Mapping[str, UsageCounts] = field(default_factory=dict)


class Grant(NamedTuple):
    """The store's answer to a report."""

    pieces: Mapping[str, float]  # of the buckets that were wanted
    left: Mapping[str, float]  # in each bucket
    streams: int  # that may be open at this gateway
    gateways: int  # that hold pieces, with this one


class Sharing(Protocol):
    """Shares the limits of tenants with other gateways; see `SharedLimits`."""

    changed: "set[Tenant]"  # the tenants that have something to report, or hold something

    @property
    def on(self) -> bool: ...

    async def ask(self, tenant: "Tenant") -> None: ...

    async def stored(self, tenant: "Tenant") -> tuple[int, UsageByModel] | None: ...


class Tenant:
    """A tenant with its limits and its usage. Its buckets and usage do not change when the file of keys is read again. Use it on the event
    loop only."""

    def __init__(
        self, name: str, *, client: str | None = None, clock: Callable[[], float] = time.monotonic, sharing: Sharing | None = None
    ) -> None:
        self.name = name
        self.client = client or f"tenant:{name}"  # the tenant's name among the clients that share queues, slots and memory
        self.since_s = int(time.time())
        self.usage: UsageByModel = {}
        self.streams = 0
        self.metrics: TenantMetrics | None = None
        self.limits = TenantLimits()
        self.reported_at = -math.inf
        self._sharing = sharing
        self._buckets: dict[str, Bucket] = {}  # "requests" and "tokens", if they are limited
        self._permits: int | None = None  # streams that may be open here; None: as many as the limit
        self._wants_stream = False
        self._gateways = 1  # how many held pieces at the time of the last grant
        self._unreported: UsageByModel = {}
        self._clock = clock

    def limit(self, limits: TenantLimits) -> None:
        """Replace the tenant's limits."""
        if limits != self.limits:
            now, before = self._clock(), self._buckets
            rates = {"requests": limits.requests, "tokens": limits.tokens}
            self._buckets = {
                what: before[what].of(rate, now) if what in before else Bucket(rate, now)
                for what, rate in rates.items()
                if rate is not None
            }
            self.limits = limits

    def must_ask(self) -> bool:
        """Return whether the store has to be asked for another piece of a bucket before the next request is admitted."""
        if not self._buckets or self._sharing is None or not self._sharing.on:
            return False
        now = self._clock()
        empty = [bucket for bucket in self._buckets.values() if self.reported_at == -math.inf or bucket.must_ask(now)]
        for bucket in empty:
            bucket.wanted = True
        return bool(empty)

    async def refill(self) -> None:
        """Ask the store for pieces until there is something to take, or the store has nothing left or fails."""
        while self.must_ask():
            await self._ask()

    async def _ask(self) -> None:
        if self._sharing is not None and self._sharing.on:
            await self._sharing.ask(self)

    def admit(self) -> None:
        """Take one request from the bucket of requests. Raises RateLimited, and takes nothing, if the bucket of requests or of tokens is
        empty."""
        if not self._buckets:
            return
        now = self._clock()
        self._note()
        for what, bucket in self._buckets.items():
            if wait_s := bucket.refused_s(now):
                raise self._refused(f"its limit is {bucket.rate} of {what}: send the request again in {wait_s:.3g} s", wait_s)
        for bucket in self._buckets.values():
            bucket.wanted = True
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1, now)

    async def begin_stream(self, call: "Call") -> None:
        """Count the answer to `call` as an open stream until `settle`. Raises RateLimited if the tenant has too many open streams."""
        limit = self.limits.streams
        if limit is not None:
            for _ in range(2):  # twice, because another caller may have asked before this stream was wanted
                if self.reported_at == -math.inf or self.streams >= self._most_streams(limit):
                    self._wants_stream = True
                    await self._ask()
            if self.streams >= self._most_streams(limit):
                raise self._refused(f"its limit is {limit} open streams: wait until one has ended", _STREAM_RETRY_S)
        self.streams += 1
        self._note()
        call.streaming = True

    def _most_streams(self, limit: int) -> int:
        return limit if self._permits is None else self._permits

    def charge(self, call: "Call") -> None:
        """Charge the tokens of `call` that were not charged yet."""
        if (bucket := self._buckets.get("tokens")) is not None and call.tokens != call.charged:
            bucket.take(call.tokens - call.charged, self._clock())
            call.charged = call.tokens
            self._note()

    def settle(self, call: "Call", status: int) -> None:
        """Charge the tokens of an ended request, add the request to the usage, and no longer count its stream as open."""
        self.charge(call)
        self.streams -= call.streaming
        prompt_tokens = call.tokens - call.completion_tokens
        if call.model and (status < 400 or call.tokens):
            for usage in (self.usage, self._unreported):
                usage.setdefault(call.model, UsageCounts()).add(1, prompt_tokens, call.completion_tokens)
            self._note()
        if self.metrics is not None:
            self.metrics.request(prompt_tokens, call.completion_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate-limit headers: for each limit that is set, the limit, the remaining amount, and the time until the bucket is
        full."""
        made: list[tuple[bytes, bytes]] = []
        now = self._clock()
        for name, bucket in self._buckets.items():
            what, left = name.encode(), max(math.floor(bucket.whole(now) + _ALMOST), 0)
            made += [
                (b"x-ratelimit-limit-" + what, b"%d" % bucket.rate.most),
                (b"x-ratelimit-remaining-" + what, b"%d" % left),
                (b"x-ratelimit-reset-" + what, duration(bucket.full_s(now)).encode()),
            ]
        return made

    def _refused(self, why: str, retry_after_s: float) -> RateLimited:
        if self.metrics is not None:
            self.metrics.limited.inc()
        return RateLimited(f"Rate limit reached for tenant {self.name}: {why}", retry_after_s=retry_after_s)

    # Sharing; `shared_limits.py` calls these ---------------------------------------------------------------------------------------------

    def _note(self) -> None:
        if self._sharing is not None and self._sharing.on:
            self._sharing.changed.add(self)

    def report(self, id: str) -> Report:
        """Return what was used since the report before. It counts as reported, so send it until the store has answered."""
        usage, self._unreported = self._unreported, {}
        return Report(id, {what: bucket.used for what, bucket in self._buckets.items()}, usage)

    def wanted(self) -> list[str]:
        """Return what the tenant has needed since `rest` was called."""
        return [what for what, bucket in self._buckets.items() if bucket.wanted] + ["streams"] * self._wants_stream

    def rest(self) -> None:
        """Forget what the tenant has needed."""
        self._wants_stream = False
        for bucket in self._buckets.values():
            bucket.wanted = False

    def granted(self, report: Report, grant: Grant) -> bool:
        """Take over the store's answer to `report`. Returns whether the tenant holds something that has to be renewed."""
        now, self.reported_at, self._gateways = self._clock(), self._clock(), max(grant.gateways, 1)
        for what, bucket in self._buckets.items():
            bucket.grant(grant.pieces.get(what), grant.left.get(what, bucket.rate.most), report.taken.get(what, 0.0), now)
        self._permits = None if self.limits.streams is None else grant.streams
        used = self._unreported or any(bucket.used for bucket in self._buckets.values())
        return bool(used or self.streams or grant.streams or any(grant.pieces.values()))

    def alone(self) -> None:
        """Go on without the store, with this gateway's share of the limits."""
        self.reported_at, share = self._clock(), 1 / self._gateways
        for bucket in self._buckets.values():
            bucket.level(self.reported_at)
            bucket.share = share
        self._permits = None if self.limits.streams is None else max(int(self.limits.streams * share), 1)

    async def used(self) -> tuple[int, UsageByModel, bool]:
        """Return since when usage is counted, the usage by model, and whether it is that of all gateways."""
        found = None if self._sharing is None else await self._sharing.stored(self)
        return (self.since_s, self.usage, False) if found is None else (*found, True)


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
