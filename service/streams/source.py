"""Sources of a stream's tokens: from the beginning of the runs, or from the position at which the client stopped.

To continue a stream, the engine needs the tokens that the client has. Stored tokens are fed to the model again. The client's other tokens
are computed again, and not sent. Before anything is sent, the hash is compared to prove that all these tokens equal the client's.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from service.errors import Diverged, ServiceError
from service.generation.request import Delta, GenerationRequest
from service.generation.runs import Runs
from service.generation.text import TextStream, Vocabulary
from service.streams.lease import StreamLease
from service.streams.position import EventId, Place, Sent


class Received(NamedTuple):
    """The part of one choice that the client has: its tokens, and the text that was sent with them."""

    place: Place
    token_ids: tuple[int, ...]
    text: str


class LeasedRuns:
    """Runs whose tokens are added to the progress of their lease, which writes it to the store. Implements `PieceSource` of
    `service/http/sse.py`.
    """

    def __init__(self, runs: Runs, lease: StreamLease) -> None:
        self._runs, self._lease = runs, lease
        self._failed = False

    @property
    def done(self) -> bool:
        return self._runs.done

    async def take(self, timeout_s: float, interval_s: float) -> Sequence[tuple[int, Delta]]:
        """Return new deltas as `Runs.take` does, and note their tokens in the lease."""
        try:
            return await self._take(timeout_s, interval_s)
        except ServiceError:
            self._failed = True
            raise

    async def _take(self, timeout_s: float, interval_s: float) -> Sequence[tuple[int, Delta]]:
        taken = await self._runs.take(timeout_s, interval_s)
        for index, delta in taken:
            self._lease.note(index, delta.token_ids, ended=delta.finish_reason is not None)
        return taken

    def close(self) -> None:
        """End the runs and the lease."""
        completed = self.done and not self._failed
        self._runs.close()
        self._lease.close("completed" if completed else "failed" if self._failed else "in_progress")


class ContinuedRuns(LeasedRuns):
    """Runs for a client that has received a part of the stream already. Deltas are returned only after this part was computed again and
    proved to be equal to the client's.
    """

    def __init__(
        self,
        runs: Runs,
        lease: StreamLease,
        wanted: EventId,
        known: Sequence[tuple[int, ...]],
        vocabulary: Vocabulary,
        received: Callable[[Sequence[Received]], Awaitable[None]],
    ) -> None:
        """`wanted`: the client's position. `known`: the first tokens of each choice, which were fed to `runs` and are not returned by them.

        `received` is awaited once, before the first delta is returned, with the part of each choice that the client has.
        """
        super().__init__(runs, lease)
        self._wanted, self._received = wanted, received
        requests = [run.request for run in runs.runs]
        self._choices = [
            _Choice(request, place, tokens, vocabulary) for request, place, tokens in zip(requests, wanted.places, known, strict=True)
        ]
        self._held: list[tuple[int, Delta]] = []  # deltas past the client's position, until all choices are past it
        self._proven = False
        lease.progress.tokens = [list(tokens) for tokens in known]
        lease.progress.ended = [False] * len(known)

    @property
    def done(self) -> bool:
        return self._proven and super().done

    async def _take(self, timeout_s: float, interval_s: float) -> Sequence[tuple[int, Delta]]:
        """Return deltas as `Runs.take` does, but only after the client's position. Raises Diverged if the tokens before it differ."""
        if self._proven:
            return await self._taken(timeout_s, interval_s)
        until = time.monotonic() + timeout_s
        while not all(choice.reached for choice in self._choices):
            if (left_s := until - time.monotonic()) <= 0:
                return []
            self._held += await self._taken(left_s, interval_s)
        self._prove()
        await self._received([choice.received for choice in self._choices])
        self._proven = True
        held, self._held = self._held, []
        return held or ([] if self.done else await self._taken(max(until - time.monotonic(), 0.0), interval_s))

    async def _taken(self, timeout_s: float, interval_s: float) -> list[tuple[int, Delta]]:
        taken = [(index, self._choices[index].rest(delta)) for index, delta in await super()._take(timeout_s, interval_s)]
        return [(index, rest) for index, rest in taken if rest is not None]

    def _prove(self) -> None:
        """Raise Diverged if the hash of the computed tokens differs from the client's hash."""
        sent = Sent(self._wanted.run, len(self._choices))
        for index, choice in enumerate(self._choices):
            sent.restore(index, choice.received.token_ids, choice.received.place)
        if self._wanted.hash is not None and sent.hash != self._wanted.hash:
            raise diverged(sent.hash, self._wanted.hash)


def diverged(hash: str, wanted: str) -> Diverged:
    return Diverged(
        f"the tokens before this position have the hash {hash}, and those that the client has {wanted}: this machine computes other "
        "tokens, so the stream cannot go on; send the request again"
    )


def released(request: GenerationRequest, vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """Return the text that was sent with `token_ids`, the first tokens of a run. Text that may be the beginning of a stop string was held
    back.
    """
    text = TextStream(vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens)
    return "".join([text.push(token_id, may_stop=at >= request.min_tokens) for at, token_id in enumerate(token_ids)])


class _Choice:
    """One choice while the client's part of it is computed again."""

    def __init__(self, request: GenerationRequest, place: Place, known: tuple[int, ...], vocabulary: Vocabulary) -> None:
        self._request, self._place, self._vocabulary = request, place, vocabulary
        self._ids = list(known)
        self._text = released(request, vocabulary, known)
        self.reached = place.tokens == len(known) and not place.ended
        self.received = Received(place, known, self._text)

    def rest(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the client does not have, or None if the client has all of it. Raises Diverged if the run ends
        before the client's position, or continues although the client has its end.
        """
        if self.reached:
            return delta._replace(text="") if self._place.ended else delta
        had = self._place.tokens
        self._ids += delta.token_ids
        self._text += delta.text
        ended = delta.finish_reason is not None
        if len(self._ids) < had or (self._place.ended and not ended):
            if ended:
                raise Diverged(f"the text ended after {len(self._ids)} tokens, and the client has {had}: send the request again")
            return None
        ids, text = tuple(self._ids[:had]), self._text
        if not self._place.ended:
            text = released(self._request, self._vocabulary, ids)
            if not self._text.startswith(text):  # the run ended with the client's last token, which has no text
                text = self._text
        self.reached, self.received = True, Received(self._place, ids, text)
        new = tuple(self._ids[had:])
        if new and self._place.ended:
            raise Diverged(f"the text has more than {had} tokens, which are all that the client has: send the request again")
        logprobs = delta.logprobs[len(delta.logprobs) - len(new) :] if new else ()
        rest = Delta(self._text[len(text) :], new, logprobs, delta.finish_reason, delta.stop_reason)
        return rest if rest != Delta("") else None
