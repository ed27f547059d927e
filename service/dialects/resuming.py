"""Begins streams that a client can continue, and continues them when the client connects again.

Each route with such streams has a function `answer(body, call, catalog, start)`. `start` contains the seeds, the id and the time of the
answer, so that a continued answer has the same ones. To continue a stream, `resume` calls the same function with the stored body.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel
from starlette.responses import Response

from service.call import RUN_HEADER, Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.states.finding import tenant_of
from service.errors import InvalidRequest, RunNotFound
from service.generation.model import Generator
from service.generation.request import Delta, GenerationRequest
from service.generation.runs import Runs
from service.http import sse
from service.states.record import IdempotencyKey, Keep
from service.streams.lease import Lease
from service.streams.position import EventId, Place, Sent
from service.streams.record import Durability, RunStart, new_run_id
from service.streams.source import ContinuedRuns, LeasedRuns, Received, diverged


class ResumableScript(sse.Script[tuple[int, Delta]], Protocol):
    """An `sse.Script`, which converts results to events, for a stream that can be continued. While `sent` is set, the events have ids."""

    runs: Runs
    sent: Sent | None

    async def restore(self, received: Sequence[Received]) -> None:
        """Set the script's state as if it had itself sent `received`, the parts of the choices that the client already has."""


class Continued(NamedTuple):
    """A stored run that is continued. `wanted`: the id of the last event that its client has received."""

    lease: Lease
    wanted: EventId


@dataclass(frozen=True)
class AnswerStart:
    """What is fixed before an answer begins: its seeds, id and time. A continued answer has those of the original answer, whose stored run
    is `continued`."""

    seeds: tuple[int, ...]  # one seed for each prompt
    id: str
    created: int  # Unix time
    continued: Continued | None = None

    @classmethod
    def new(cls, id_prefix: str, seed: int | None, prompts: int) -> "AnswerStart":
        return cls(generation.seeds(seed, prompts), generation.new_id(id_prefix), generation.now())

    @classmethod
    def again(cls, continued: Continued) -> "AnswerStart":
        start = continued.lease.start
        return cls(start.seeds, start.answer_id, start.created, continued)

    @property
    def places(self) -> tuple[Place, ...]:
        """Return how much of each choice the client has received; () for a new answer."""
        return () if self.continued is None else self.continued.wanted.places

    def of_stream(self, asked: Sequence[GenerationRequest], model: Generator) -> list[GenerationRequest]:
        """Return the requests `asked`, adapted to a stream that can be continued.

        In a continued stream, `known` of each request has the tokens that were drawn before. A continued stream may draw the last token
        again, and then stores the state after it again. The id of that state is derived from the answer's id, so there is only one such
        state. Raises Diverged if the model or the arithmetic has changed since the stream began, and the client sent no hash of the tokens
        that it has.
        """
        asked = [
            request if request.keep is None else replace(request, keep=self._once(request.keep, at)) for at, request in enumerate(asked)
        ]
        if self.continued is None:
            return asked
        lease, wanted = self.continued
        if lease.start.fingerprint != model.manifest.fingerprint or not model.engine.has_numerics(lease.start.numerics):
            if wanted.hash is None and any(place.tokens for place in wanted.places):
                raise diverged("of another model or machine", "unknown")
            return asked
        progress = lease.progress
        parts = zip(asked, wanted.places, progress.tokens, progress.ended, strict=True)
        return [
            replace(request, known=_known(request, place, tuple(tokens), ended), numerics=lease.start.numerics)
            for request, place, tokens, ended in parts
        ]

    def _once(self, keep: Keep, index: int) -> Keep:
        key = keep.key or IdempotencyKey(f"{self.id}/{index}", self.id)
        return replace(keep, record=replace(keep.record, id=generation.derived_id("state_", f"{self.id}/{index}")), key=key)


def _known(request: GenerationRequest, place: Place, tokens: tuple[int, ...], ended: bool) -> tuple[int, ...]:
    """Return the stored tokens of a choice that the client has. The last stored token is left out if the choice may end with it: this token
    is drawn again, because an ended run cannot be continued."""
    if request.prompt_logprobs is not None:  # only a run without known tokens computes the prompt's log-probabilities
        return ()
    if place.tokens < len(tokens):
        return tokens[: place.tokens]
    return tokens[:-1] if ended or place.tokens == len(tokens) else tokens


async def stream(
    script: ResumableScript,
    body: BaseModel,
    start: AnswerStart,
    model: Generator,
    call: Call,
    catalog: Catalog,
    *,
    path: str,
    durability: Durability,
) -> Response:
    """Return the response that streams the script's runs, from the beginning or from the position at which the client stopped.

    The request is stored as `path` and `body`, so that it can be repeated. With durability `turn` the response waits until the run is
    stored, and the store's errors are raised. Otherwise a run that cannot be stored is streamed without the header x-run-id and without
    ids.
    """
    runs, settings = script.runs, catalog.settings
    if start.continued is not None:
        return _continued(script, start.continued, model, call, catalog)
    lease = None if durability == "none" else _begun(runs, body, start, model, call, catalog, path)
    if lease is None:
        return await sse.stream(runs, script, call, settings)
    source = LeasedRuns(runs, lease)
    try:
        first = await sse.first_pieces(source, settings)
        if not await lease.begun(patient=durability == "turn"):
            lease.abandon()
            return sse.EventStream(runs, script, first, call, settings)
    except BaseException:
        lease.abandon()
        runs.close()
        raise
    script.sent = Sent(lease.id, len(runs.runs))
    call.headers[RUN_HEADER] = lease.id
    return sse.EventStream(source, script, first, call, settings, priming=script.sent.line + sse.RETRY, owner=lease)


def _begun(runs: Runs, body: BaseModel, start: AnswerStart, model: Generator, call: Call, catalog: Catalog, path: str) -> Lease | None:
    """Return the lease of a new run, without waiting for the write of the run. Return None if there is no store."""
    if (leases := catalog.leases) is None:
        return None
    run = RunStart(
        id=new_run_id(),
        tenant=tenant_of(call),
        path=path,
        body=body.model_dump_json(by_alias=True).encode(),
        seeds=start.seeds,
        answer_id=start.id,
        created=start.created,
        model=model.name,
        fingerprint=model.manifest.fingerprint,
        numerics=runs.runs[0].numerics,  # one engine runs all choices
    )
    return leases.begin(run, len(runs.runs), runs_s=call.deadline - time.monotonic())


def _continued(script: ResumableScript, continued: Continued, model: Generator, call: Call, catalog: Catalog) -> Response:
    lease, wanted = continued
    requests = [run.request for run in script.runs.runs]
    source = ContinuedRuns(script.runs, lease, wanted, [request.known for request in requests], model.vocabulary, script.restore)
    script.sent = Sent(lease.id, len(requests))
    for index, place in enumerate(wanted.places):
        if not place.tokens:
            script.sent.restore(index, (), place)
    call.headers[RUN_HEADER] = lease.id
    priming = b"id: %b\n" % str(wanted).encode() + sse.RETRY + (b"\n" if call.priming else b"")
    return sse.EventStream(source, script, (), call, catalog.settings, priming=priming, owner=lease)


# When a client connects again ----------------------------------------------------------------------------------------------------------


class Resumable(NamedTuple):
    """A route whose streams can be continued: the class of its body, and its function `answer`."""

    body: type[BaseModel]
    answer: Callable[[Any, Call, Catalog, AnswerStart], Awaitable[Any]]


async def resume(wanted: EventId, routes: Mapping[str, Resumable], call: Call, catalog: Catalog) -> Any:
    """Return the rest of a stream after the position `wanted`. `routes` maps paths to the routes whose streams can be continued.

    If `wanted` has the position in one choice and no hash, this position applies to all choices. Raises NotReady while the models
    are loaded, RunNotFound, InvalidRequest, or an error of the route."""
    if (leases := catalog.leases) is None:
        catalog.find(None)
        raise RunNotFound(f"there is no run {wanted.run}: no decoder is served here", param="run")
    lease = await leases.take_over(tenant_of(call), wanted.run, runs_s=call.deadline - time.monotonic())
    try:
        if (route := routes.get(lease.start.path)) is None:
            raise InvalidRequest(f"the run {lease.id} is one of {lease.start.path}: send the request there", param="run")
        choices = len(lease.progress.tokens)
        if wanted.hash is None and len(wanted.places) == 1:
            wanted = wanted._replace(places=wanted.places * choices)
        if len(wanted.places) != choices:
            raise InvalidRequest(f"the position is of {len(wanted.places)} choices, and the run has {choices}", param="run")
        body = route.body.model_validate_json(lease.start.body)
        return await route.answer(body, call, catalog, AnswerStart.again(Continued(lease, wanted)))
    except BaseException:
        lease.close("in_progress")
        raise
