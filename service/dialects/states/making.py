"""Routes that let a model compute states: from a prompt, from further text after another state, and at an earlier position of a state."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Response
from numpy.typing import NDArray

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.chat import messages_of
from service.dialects.states.finding import KeyHeader, Match, MatchDep, StatePath, change_of, find, key_of, no_state, on_store, store_of
from service.dialects.states.options import KeepFields
from service.dialects.states.records import described, new_record, quota_of, replayed, sent
from service.dialects.states.routes import copied
from service.dialects.states.schemas import ERRORS, CreateState, RewindState, StateObject, json_body
from service.dialects.text.request import Beginning, TextCall, beginning_of
from service.errors import InvalidRequest, ServiceError
from service.generation.chat.continuation import turn_of
from service.generation.model import DecoderModel
from service.generation.request import GenerationRequest, Sampling
from service.generation.runs import Runs
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, read
from service.states.engine import StateEngine
from service.states.record import ID, Ancestor, IdempotencyKey, Keep, NameChange, Origin, StateRecord, Turn

router = APIRouter(route_class=JsonRoute, tags=["States"], responses=ERRORS)


class _Work(NamedTuple):
    """What the model must compute: it feeds the tokens `prompt` to the state `text.begin`. `parent`: the id of the state from which the new
    one is made. `param`: the field of the body with the tokens."""

    text: TextCall[DecoderModel]
    prompt: Sequence[int]
    parent: str | None
    origin: Origin
    turn: Turn
    param: str


@router.post("/v1/states", response_model=StateObject, openapi_extra=json_body(CreateState))
async def create(content: ContentDep, call: CallDep, catalog: CatalogDep, match: MatchDep, idempotency_key: KeyHeader = None) -> Any:
    """Let a model read a prompt, and store the state after it. With `parent` the prompt continues that state.

    `If-Match` is the version that `name` must have now. If it has another version, the answer is 412.
    """
    body = read(CreateState, content, call)
    key = key_of(idempotency_key, "create", body.model_dump(), *match)
    change, earlier = await _before(body, key, match, catalog, call)
    if earlier is not None:
        return sent(earlier, call, replayed=True, name=body.name)
    param = _one_of(body, "prompt", "token_ids", "messages")
    begin = await beginning_of(catalog, call, body.parent, body.exact, "parent")
    text = TextCall.of(body.model, begin, call, catalog)
    turn: Turn = ""
    if body.prompt is not None:
        prompt = await text.text(body.prompt)
    elif body.token_ids is not None:
        text.check_ids(prompt := body.token_ids, param)
    else:
        messages = messages_of(body.messages or ())
        turn = turn_of(messages)
        prompt = await text.messages(messages, None, param, add_generation_prompt=False)
    parent = None if begin is None else begin.record.id
    work = _Work(text, prompt, parent, "prompt" if begin is None else "continuation", turn, param)
    return await _made(work, body, key, change)


@router.post("/v1/states/{state}/rewind", response_model=StateObject, openapi_extra=json_body(RewindState))
async def rewind(
    state: StatePath, content: ContentDep, call: CallDep, catalog: CatalogDep, match: MatchDep, idempotency_key: KeyHeader = None
) -> Any:
    """Make a state at an earlier position of this state's tokens. The position is given as a number, as a number of tokens to go back, or
    by an ancestor.

    The model reads the tokens after the nearest stored ancestor again, which gives the same state.
    """
    body = read(RewindState, content)
    key = key_of(idempotency_key, "rewind", state, body.model_dump(), *match)
    change, earlier = await _before(body, key, match, catalog, call)
    if earlier is not None:
        return sent(earlier, call, replayed=True, name=body.name)
    param = _one_of(body, "to", "tokens", "to_state")

    def planned(engine: StateEngine, tenant: str) -> tuple[StateRecord, Replay]:
        record = find(engine, tenant, state).record
        line = beginnings(engine.lineage(tenant, record.id))
        return record, replay_to(_target(engine, tenant, body, record, line), line, time.time(), param)

    record, (nearest, ids) = await on_store(catalog, call, planned)
    if nearest is not None and not ids:
        copy = replace(copied(nearest, body, catalog.settings), origin="rewind")

        def kept(engine: StateEngine) -> tuple[dict[str, Any], bool]:
            made = engine.put(copy, None, quota=quota_of(catalog.settings), name=change, key=key)
            return described(engine, made), made.id != copy.id

        made, again = await store_of(catalog).call(kept)
        return sent(made, call, replayed=again, name=body.name)
    model = TextCall.of(None, Beginning(record, None, body.exact), call, catalog).model
    text = TextCall(model, call, catalog, None if nearest is None else Beginning(nearest, None, body.exact))
    return await _made(_Work(text, ids, (nearest or record).id, "rewind", "", param), body, key, change)


def _target(engine: StateEngine, tenant: str, body: RewindState, record: StateRecord, line: Sequence[Ancestor]) -> int:
    """Return the position of the new state, in tokens. Raises InvalidRequest if it is below 1 or after the state's own position, and
    StateNotFound if `to_state` is no ancestor."""
    has_seen = f"the state has seen {record.position} tokens"
    if body.to is not None:
        if body.to > record.position:
            raise InvalidRequest(f"{has_seen}, so to={body.to} is ahead of it: send 1 to {record.position}", param="to")
        return body.to
    if body.tokens is not None:
        if body.tokens >= record.position:
            raise InvalidRequest(
                f"{has_seen}, so it can go back {record.position - 1} at most, not tokens={body.tokens}: one token must stay",
                param="tokens",
            )
        return record.position - body.tokens
    wanted = body.to_state or ""
    if not ID.fullmatch(wanted):
        wanted = find(engine, tenant, wanted, "to_state").record.id
    positions = {each.record.id: each.record.position for each in line}
    if wanted not in positions:
        raise no_state("to_state")
    return positions[wanted]


def _one_of(body: CreateState | RewindState, *names: str) -> str:
    """Return the name of the field that is set. Raises InvalidRequest unless exactly one of the fields is set."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"the body has {' and '.join(given) or 'none'} of {', '.join(names)}: send exactly one", param=given[1] if given else names[0]
        )
    return given[0]


async def _before(
    body: KeepFields, key: IdempotencyKey | None, match: Match, catalog: Catalog, call: Call
) -> tuple[NameChange | None, dict[str, Any] | None]:
    """Do the checks before any computing. Return the change of a name that the request asks for, and the JSON of the state that an earlier
    request with the same key has made. Either may be None."""

    def looked_up(engine: StateEngine, tenant: str) -> tuple[NameChange | None, dict[str, Any] | None]:
        if key is not None and (made := engine.answered(tenant, key)) is not None:
            return None, described(engine, made)
        return change_of(engine, tenant, body.name, match), None

    return await on_store(catalog, call, looked_up)


async def _made(work: _Work, body: CreateState | RewindState, key: IdempotencyKey | None, change: NameChange | None) -> Response:
    """Feed the tokens to the model, and return a response with the state that the generator has stored."""
    model, call, catalog, begin = work.text.model, work.text.call, work.text.catalog, work.text.begin
    record = new_record(
        body,
        catalog.settings,
        tenant=call.tenant_name,
        model=model.name,
        fingerprint=model.manifest.fingerprint,
        parent=work.parent,
        origin=work.origin,
        turn=work.turn,
    )
    request = GenerationRequest(
        prompt=tuple(work.prompt),
        sampling=Sampling(seed=0),
        max_tokens=0,
        **call.origin,
        start=None if begin is None else begin.reference,
        keep=Keep(record=record, quota=quota_of(catalog.settings), name=change, key=key),
    )
    store = store_of(catalog)
    try:
        runs = await Runs.submit(model, [request], call, n=1, prompt_field=work.param, stream=False)
        await runs.all()
    except ServiceError as error:
        if key is not None and (earlier := await store.call(lambda engine: replayed(engine, record.tenant, key))) is not None:
            return sent(earlier, call, replayed=True, name=body.name)  # another request with this key has made the state meanwhile
        if error.param == "state" and isinstance(body, CreateState):
            error.param = "parent"
        raise

    def kept_now(engine: StateEngine) -> tuple[dict[str, Any], StateRecord]:
        kept = engine.get(record.tenant, record.id)
        return described(engine, kept), kept

    content, kept = await store.call(kept_now)
    content["usage"] = {"prompt_tokens": runs.prompt_tokens, "cached_tokens": runs.cached_tokens}
    content["exact"] = begin is None or begin.record.numerics == kept.numerics
    return sent(content, call, name=body.name)


# The tokens of a state at an earlier position ---------------------------------------------------------------------------------------------


class Replay(NamedTuple):
    """The instructions for computing a state: feed the tokens `ids` to the state `begin`, or to the empty state if `begin` is None."""

    begin: StateRecord | None
    ids: tuple[int, ...]


def beginnings(line: Sequence[Ancestor]) -> list[Ancestor]:
    """Return the states of a lineage with whose tokens the first state begins. The others are states from which it was rewound: they are
    at later positions."""
    reached = accumulate((each.record.position for each in line), min)
    return [each for each, position in zip(line, reached, strict=True) if each.record.position == position]


def replay_to(position: int, line: Sequence[Ancestor], now: float, param: str) -> Replay:
    """Return how to compute the state at `position` from the nearest ancestor that is still stored.

    `line`: the `beginnings` of a state's lineage. Raises InvalidRequest if some of the tokens to feed are unknown, such
    as the tokens before an uploaded state.
    """
    kept = [each.record for each in line if _is_kept(each.record, now) and each.record.position <= position]
    begin = max(kept, key=lambda record: record.position, default=None)
    first = 0 if begin is None else begin.position
    pieces: list[NDArray[np.int32]] = []
    end = position  # the tokens from here to `position` are in `pieces`
    for ancestor in line:
        ids = np.frombuffer(ancestor.ids, "<i4")
        at = ancestor.record.position - len(ids)  # the position before the first of these tokens
        if at < end <= ancestor.record.position and end > first:
            start = max(at, first)
            pieces.append(ids[start - at : end - at])
            end = start
    if end > first:
        raise InvalidRequest(
            f"no state is kept at position {position} or before from which its tokens are known: those before {end} are not", param=param
        )
    return Replay(begin, tuple(int(token) for piece in reversed(pieces) for token in piece))


def _is_kept(record: StateRecord, now: float) -> bool:
    return record.status == "ready" and (record.expires is None or record.expires > now)
