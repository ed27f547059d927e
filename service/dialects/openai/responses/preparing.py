"""Converts the body of a request for a response to a request to the engine.

For a background response, or one with an Idempotency-Key, the body is stored too, so that another process can generate the response.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from service.call import Call
from service.catalog import Catalog
from service.dialects.openai.responses.items import messages_of
from service.dialects.openai.responses.schemas import LOGPROBS, ResponseRequest
from service.dialects.openai.tool_calls import choose
from service.dialects.openai.written_calls import written_form
from service.dialects.states.records import state_of
from service.dialects.text.answer import check_chat_size
from service.dialects.text.grammars import format_grammar, grammar_of
from service.dialects.text.request import Beginning, TextCall, beginning_of
from service.errors import EmptyInput, InvalidRequest, StateGone, StateNotFound
from service.generation.model import DecoderModel
from service.generation.request import GenerationRequest
from service.runtime.lanes import Lane
from service.states.record import IdempotencyKey


class Prepared(NamedTuple):
    """A checked request for a response: the model, and the request to its engine."""

    model: DecoderModel
    request: GenerationRequest
    call: Mapping[str, Any] | None  # the tool calls that the text has; see `Answer`
    begin: Beginning | None  # the state that the request's prompt continues


def check(body: ResponseRequest) -> None:
    """Raise InvalidRequest or EmptyInput if the body violates a constraint that a schema cannot express."""
    if body.top_logprobs and LOGPROBS not in body.include:
        raise InvalidRequest(f'top_logprobs needs include=["{LOGPROBS}"]', param="top_logprobs")
    if body.input == "":
        raise EmptyInput("`input` cannot be empty", param="input")
    for name in ("tools", "text", "guided_json", "structured_outputs"):  # these are serialised again, for the store or the answer
        try:
            orjson.dumps(getattr(body, name), default=BaseModel.model_dump)
        except TypeError:
            raise InvalidRequest(f"`{name}` has an integer of more than 64 bits: send a shorter one, or a text", param=name) from None
    if body.background and not body.store:
        raise InvalidRequest("background=true needs store=true: otherwise nobody could read the response", param="background")
    if body.previous_response_id and body.state:
        raise InvalidRequest("previous_response_id and state cannot be combined: a response continues one of them", param="state")
    if body.conversation is not None:
        for name in ("previous_response_id", "state"):
            if getattr(body, name):
                raise InvalidRequest(f"conversation and {name} cannot be combined: a response continues one of them", param=name)
        if not body.store:
            raise InvalidRequest("conversation needs store=true: the response becomes part of it", param="store")


async def beginning(body: ResponseRequest, previous: str | None, catalog: Catalog, call: Call) -> Beginning | None:
    """Return the state that the response continues, or None. It is `previous`, the state after another response, or else the body's state.

    Raises StateGone if the state is gone; it is not computed again. For a deleted state, raises StateGone if it is `previous`, and
    StateNotFound if it is the body's.
    """
    if previous is None:
        return await beginning_of(catalog, call, body.state, body.exact)
    asked = body.previous_response_id
    try:
        return await beginning_of(catalog, call, previous, body.exact, "previous_response_id")
    except StateNotFound:
        why = f"the state {previous} was deleted"
    except StateGone as error:
        why = error.message
    raise StateGone(
        f"the response {asked} cannot be continued: {why}; send the whole conversation as `input`", param="previous_response_id"
    ) from None


async def prepare(
    body: ResponseRequest, begin: Beginning | None, catalog: Catalog, call: Call, *, response: str, again: bool = False
) -> Prepared:
    """Return the request to the engine. Also sets the body's model and seed: with them, another process generates the same tokens.

    `response`: the response's id. If it is stored, the id and the idempotency key of the state after the last token are derived from it.
    So the state is stored only once, even if several processes generate the response.

    `again`: another process may have generated the response before. It may then have moved the name in `store_state` already, so the
    name's version is not checked.
    """
    text = TextCall.of(body.model, begin, call, catalog)
    if not again:
        await text.check_name(body)
    tools, calling = choose(body.tool_choice, body.tools)
    prompt = await text.messages(messages_of(body), tools, "input")
    if calling is not None:
        prompt = [*prompt, *await calling.opening(text.model, tools)]
    format_ = body.text.format if body.text else None
    grammar = format_grammar(format_.type, format_.schema_, "text.format.schema") if format_ else None
    if body.seed is None:
        body.seed = secrets.randbits(63)
    body.model = text.model.name
    if body.store and not body.store_state:
        body.store_state = True
    (request,) = text.requests(
        body,
        [prompt],
        max_tokens=body.max_output_tokens or catalog.settings.default_max_tokens,
        max_tokens_field="max_output_tokens",
        grammar=grammar_of(body, grammar, "text.format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in body.include else None,
        turn="generated",
    )
    # Streams are checked too, since their last event contains the whole answer.
    check_chat_size(text.model, request, catalog.settings, fields={"max_output_tokens": True, "top_logprobs": body.top_logprobs})
    if body.store and (keep := request.keep) is not None:
        record = replace(keep.record, id=state_of(response), origin="response")
        # The key cannot equal a client's key, since a client's key has no spaces.
        keep = replace(keep, record=record, key=IdempotencyKey(f"response {response}", ""))
        request = replace(request, keep=keep)
    form = await written_form(text.model, tools, skip_special_tokens=body.skip_special_tokens, several=body.parallel_tool_calls)
    return Prepared(text.model, request, form if calling is None else {"name": calling.only}, begin)


def work_of(body: ResponseRequest, begin: Beginning | None, prepared: Prepared, call: Call) -> dict[str, Any]:
    """Return the data that another process needs to generate the response. They include the seed, so it draws the same tokens."""
    again = body.model_copy(update={"state": None if begin is None else begin.record.id, "max_output_tokens": prepared.request.max_tokens})
    again.previous_response_id = None
    lane = (Lane.BULK if body.background else Lane.INTERACTIVE) if call.lane is None else call.lane
    # Ignored fields may have integers of more than 64 bits, which orjson reads as floats and cannot write.
    stored_body = orjson.loads(again.model_dump_json(by_alias=True, exclude_none=True))
    return {"body": stored_body, "client": call.client, "lane": lane.name}
