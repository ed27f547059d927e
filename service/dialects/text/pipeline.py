"""The pipeline of completions and chat: from a body to the answer, as a whole or as a stream that a client can continue.

What is special to a route is in its `TextRoute`. `AnswerStart` contains the seeds, the id and the time of the answer, so that a continued
answer has the same ones. A stream is stored as the path and the body of its request. To continue it, `resume` answers that body again.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from starlette.responses import Response

from service.call import LAST_EVENT_HEADER, RUN_HEADER, Call
from service.catalog import Catalog
from service.dialects.states.finding import on_store
from service.dialects.text.answer import derived_id, new_id, unix_time
from service.dialects.text.request import TextCall, beginning_of, seeds
from service.dialects.text.schemas import GenerationRequestBody
from service.errors import InvalidRequest, RunNotFound, StateGone, StateNotFound
from service.generation.model import DecoderModel, Generator
from service.generation.request import Delta, GenerationRequest, Grammar
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import json_answer
from service.settings import Settings
from service.states.engine import StateEngine
from service.states.record import IdempotencyKey, Keep, Turn
from service.streams.lease import StreamLease
from service.streams.position import EventId, Place, Sent
from service.streams.record import RunStart, new_run_id
from service.streams.source import ContinuedRuns, LeasedRuns, Received, diverged

Body = TypeVar("Body", bound=GenerationRequestBody)


class Answer(sse.Script[tuple[int, Delta]], Protocol):
    """Builds the answer of a request from its runs: the events of a stream, or the whole answer."""

    runs: Runs

    async def whole(self) -> Any:
        """Return the content of the whole answer. Its parts are serialised while the tokens arrive."""


class ResumableAnswer(Answer, Protocol):
    """An answer whose stream can be continued. While `sent` is set, the events have ids."""

    sent: Sent | None

    async def restore(self, received: Sequence[Received]) -> None:
        """Set the answer's state as if it had itself sent `received`, the parts of the choices that the client already has."""


class Continued(NamedTuple):
    """A stored run that is continued. `wanted`: the id of the last event that its client has received."""

    lease: StreamLease
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
        return cls(seeds(seed, prompts), new_id(id_prefix), unix_time())

    @classmethod
    def again(cls, continued: Continued) -> "AnswerStart":
        start = continued.lease.start
        return cls(start.seeds, start.answer_id, start.created, continued)

    @property
    def places(self) -> tuple[Place, ...]:
        """Return how much of each choice the client has received; () for a new answer."""
        return () if self.continued is None else self.continued.wanted.places

    async def of_stream(self, asked: Sequence[GenerationRequest], text: TextCall[DecoderModel]) -> list[GenerationRequest]:
        """Return the requests `asked`, adapted to a stream that can be continued.

        In a continued stream, `known` of each request has the tokens that were drawn before. A continued stream may draw the last token
        again, and then stores the state after it again. The id of that state is derived from the answer's id, so there is only one such
        state. If it was deleted or has expired since, the stream ends without it.

        Raises InvalidRequest if the client's position is after the end of a choice, or Diverged if the model or the arithmetic has changed
        since the stream began, and the client sent no hash of the tokens that it has.
        """
        asked = [
            request if request.keep is None else replace(request, keep=await self._once(request.keep, at, text))
            for at, request in enumerate(asked)
        ]
        if self.continued is None:
            return asked
        (lease, wanted), model = self.continued, text.model
        same = lease.start.fingerprint == model.manifest.fingerprint and model.engine.has_numerics(lease.start.numerics)
        adapted = []
        parts = zip(asked, wanted.places, lease.progress.tokens, lease.progress.ended, strict=True)
        for index, (request, place, tokens, ended) in enumerate(parts):
            most = len(tokens) if same and ended else request.max_tokens
            if place.tokens > most:
                raise InvalidRequest(
                    f"{wanted.param} names {place.tokens} tokens of choice {index}, which has {most} at most: name {most} or fewer",
                    param=wanted.param,
                )
            if same:
                known = _known(request, place, tuple(tokens), ended)
                request = replace(request, max_tokens=most, known=known, numerics=lease.start.numerics)
            adapted.append(request)
        if not same and wanted.hash is None and any(place.tokens for place in wanted.places):
            raise diverged("of another model or machine", "unknown")
        return adapted

    async def _once(self, keep: Keep, index: int, text: TextCall[DecoderModel]) -> Keep:
        key, gone = IdempotencyKey(f"{self.id}/{index}", self.id), False
        if self.continued is not None:
            try:
                await on_store(text.catalog, text.call, StateEngine.answered, key)
            except (StateNotFound, StateGone):
                gone = True
        return replace(keep, record=replace(keep.record, id=derived_id("state_", f"{self.id}/{index}")), key=key, gone=gone)


def _known(request: GenerationRequest, place: Place, tokens: tuple[int, ...], ended: bool) -> tuple[int, ...]:
    """Return the stored tokens of a choice that the client has. The last stored token is left out if the choice may end with it: this token
    is drawn again, because an ended run cannot be continued."""
    if request.prompt_logprobs is not None:  # only a run without known tokens computes the prompt's log-probabilities
        return ()
    if place.tokens < len(tokens):
        return tokens[: place.tokens]
    return tokens[:-1] if ended or place.tokens == len(tokens) else tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a route makes of a body: the prompts and options of the requests to the engine, and how their runs become an answer."""

    prompts: Sequence[list[int]]
    max_tokens: int
    max_tokens_field: str  # the name of `max_tokens` in the body
    check_size: Callable[[GenerationRequest], None]  # raises NeverFits if the answer could be too large; gets the first request
    answer: Callable[[Runs, AnswerStart], ResumableAnswer]
    grammar: Grammar | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    turn: Turn = ""
    stored: Mapping[str, Any] = field(default_factory=dict)  # what a stored body has in place of the client's fields


@dataclass(frozen=True, kw_only=True)
class TextRoute(Generic[Body]):
    """What is special to a route. `encoder_decoder` answers if the model is an encoder-decoder; None: the route has no such models."""

    path: str
    body: type[Body]
    id_prefix: str
    prompt_field: str
    plan: Callable[[Body, TextCall[DecoderModel]], Awaitable[Plan]]
    encoder_decoder: Callable[[Body, TextCall[Generator]], Awaitable[Response]] | None = None

    async def answer(self, body: Body, call: Call, catalog: Catalog, start: AnswerStart | None = None) -> Response:
        """Answer a request. If the answer continues an interrupted stream, `start` has the stream's seeds, id and position."""
        if start is None and body.stream and call.last_event_id is not None:
            return await resume(EventId.parse(call.last_event_id, LAST_EVENT_HEADER), (self,), call, catalog)
        begin = await beginning_of(catalog, call, body.state, body.exact)
        name = body.model or (None if begin is None else begin.record.model)
        if self.encoder_decoder is not None and (model := catalog.encoder_decoder(name)) is not None:
            return await self.encoder_decoder(body, TextCall(model, call, catalog))
        text = TextCall.of(name, begin, call, catalog)
        if start is None:
            await text.check_name(body)
        plan = await self.plan(body, text)
        start = start or AnswerStart.new(self.id_prefix, body.seed, len(plan.prompts))
        requests = text.requests(
            body,
            plan.prompts,
            n=body.n,
            max_tokens=plan.max_tokens,
            max_tokens_field=plan.max_tokens_field,
            grammar=plan.grammar,
            top_logprobs=plan.top_logprobs,
            prompt_logprobs=plan.prompt_logprobs,
            drawn=start.seeds,
            turn=plan.turn,
        )
        plan.check_size(requests[0])
        if body.stream:
            requests = await start.of_stream(requests, text)
        runs = await text.submit(requests, n=body.n, prompt_field=self.prompt_field, stream=body.stream)
        answer = plan.answer(runs, start)
        if not body.stream:
            return await sent(answer, call, catalog.settings, stream=False)
        if start.continued is not None:
            return _continued(answer, start.continued, text)
        again = body.model_copy(update={**plan.stored, "model": text.model.name, "state": begin and begin.record.id})
        return await self._stream(answer, again, start, text)

    async def _stream(self, answer: ResumableAnswer, body: Body, start: AnswerStart, text: TextCall[DecoderModel]) -> Response:
        """Return the response that streams the answer from its beginning.

        The request is stored as `path` and `body`, so that it can be repeated. With durability `turn` the response waits until the run is
        stored, and the store's errors are raised. Otherwise a run that cannot be stored is streamed without the header x-run-id and without
        ids.
        """
        runs, call, settings = answer.runs, text.call, text.catalog.settings
        lease = None if body.durability == "none" else self._begun(runs, body, start, text)
        if lease is None:
            return await sent(answer, call, settings, stream=True)
        source = LeasedRuns(runs, lease)
        try:
            first = await sse.first_pieces(source, settings)
            if not await lease.begun(patient=body.durability == "turn"):
                lease.abandon()
                return sse.EventStream(runs, answer, first, call, settings)
        except BaseException:
            lease.abandon()
            runs.close()
            raise
        answer.sent = Sent(lease.id, len(runs.runs))
        call.headers[RUN_HEADER] = lease.id
        return sse.EventStream(source, answer, first, call, settings, priming=answer.sent.line + sse.RETRY, owner=lease)

    def _begun(self, runs: Runs, body: Body, start: AnswerStart, text: TextCall[DecoderModel]) -> StreamLease | None:
        """Return the lease of a new run, without waiting for the write of the run. Return None if there is no store."""
        if (leases := text.catalog.leases) is None:
            return None
        run = RunStart(
            id=new_run_id(),
            tenant=text.call.tenant_name,
            path=self.path,
            body=body.model_dump_json(by_alias=True).encode(),
            seeds=start.seeds,
            answer_id=start.id,
            created=start.created,
            model=text.model.name,
            fingerprint=text.model.manifest.fingerprint,
            numerics=runs.runs[0].numerics,  # one engine runs all choices
        )
        return leases.begin(run, len(runs.runs), runs_s=text.call.deadline - time.monotonic())


async def sent(answer: Answer, call: Call, settings: Settings, *, stream: bool) -> Response:
    """Return the response with the answer: a stream that cannot be continued, or the whole answer."""
    if stream:
        return await sse.stream(answer.runs, answer, call, settings)
    return json_answer(await answer.whole(), call.headers)


# When a client connects again ------------------------------------------------------------------------------------------------------------


def _continued(answer: ResumableAnswer, continued: Continued, text: TextCall[DecoderModel]) -> Response:
    lease, wanted = continued
    requests = [run.request for run in answer.runs.runs]
    source = ContinuedRuns(answer.runs, lease, wanted, [request.known for request in requests], text.model.vocabulary, answer.restore)
    answer.sent = Sent(lease.id, len(requests))
    for index, place in enumerate(wanted.places):
        if not place.tokens:
            answer.sent.restore(index, (), place)
    text.call.headers[RUN_HEADER] = lease.id
    priming = b"id: %b\n" % str(wanted).encode() + sse.RETRY + (b"\n" if text.call.priming else b"")
    return sse.EventStream(source, answer, (), text.call, text.catalog.settings, priming=priming, owner=lease)


async def resume(wanted: EventId, routes: Sequence[TextRoute[Any]], call: Call, catalog: Catalog) -> Response:
    """Return the rest of a stream of one of `routes`, after the position `wanted`.

    If `wanted` has the position in one choice and no hash, this position applies to all choices. Raises NotReady while the models
    are loaded, RunNotFound, InvalidRequest, or an error of the route."""
    if (leases := catalog.leases) is None:
        catalog.find(None)
        raise RunNotFound(f"there is no run {wanted.run}: no decoder is served here", param="run")
    lease = await leases.take_over(call.tenant_name, wanted.run, runs_s=call.deadline - time.monotonic())
    try:
        if (route := next((route for route in routes if route.path == lease.start.path), None)) is None:
            raise InvalidRequest(f"the run {lease.id} is one of {lease.start.path}: send the request there", param="run")
        choices = len(lease.progress.tokens)
        if wanted.hash is None and len(wanted.places) == 1:
            wanted = wanted._replace(places=wanted.places * choices)
        if len(wanted.places) != choices:
            raise InvalidRequest(f"the position is of {len(wanted.places)} choices, and the run has {choices}", param="run")
        body = route.body.model_validate_json(lease.start.body)
        return await route.answer(body, call, catalog, AnswerStart.again(Continued(lease, wanted)))
    except BaseException:
        lease.close()
        raise
