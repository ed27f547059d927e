"""A body becomes a request to the engine. The work of a background response is stored in the form of its body."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from service.call import Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.answer_size import check_chat_size
from service.dialects.openai.responses.items import messages_of
from service.dialects.openai.responses.schemas import LOGPROBS, AllowedFunctions, ResponseRequest
from service.dialects.openai.tool_calls import Calling, choose
from service.dialects.states import turns
from service.dialects.states.turns import Beginning
from service.errors import EmptyInput, InvalidRequest, StateGone, StateNotFound
from service.generation.model import DecoderModel
from service.generation.request import GenerationRequest
from service.states.record import IdempotencyKey


class Prepared(NamedTuple):
    """A response that can be generated."""

    model: DecoderModel
    request: GenerationRequest
    call: Mapping[str, str | None] | None  # see `Answer`
    position: int  # tokens before the request's prompt, which the state has seen

    @property
    def state(self) -> str | None:
        """Return the id of the state that will be kept."""
        return None if self.request.keep is None else self.request.keep.record.id


def check(body: ResponseRequest) -> None:
    """Check constraints that a schema cannot express."""
    if body.top_logprobs and LOGPROBS not in body.include:
        raise InvalidRequest(f'top_logprobs needs include=["{LOGPROBS}"]', param="top_logprobs")
    if body.input == "":
        raise EmptyInput("`input` cannot be empty", param="input")
    if body.background and not body.store:
        raise InvalidRequest("background=true needs store=true: otherwise nobody could read the response", param="background")
    if body.previous_response_id and body.state:
        raise InvalidRequest("previous_response_id and state cannot be combined: a response continues one of them", param="state")


async def beginning(body: ResponseRequest, previous: str | None, catalog: Catalog, call: Call) -> Beginning | None:
    """Return where the response begins: at the state `previous` of another response, at the body's state, or at none.

    A state that is gone is never computed again silently. Raises StateGone, also for one that was deleted, or StateNotFound for the body's.
    """
    if previous is None:
        return await turns.beginning_of(catalog, call, body.state, body.exact, "state")
    asked = body.previous_response_id
    try:
        return await turns.beginning_of(catalog, call, previous, body.exact, "previous_response_id")
    except StateNotFound:
        why = f"the state {previous} was deleted"
    except StateGone as error:
        why = error.message
    raise StateGone(
        f"the response {asked} cannot be continued: {why}; send the whole conversation as `input`", param="previous_response_id"
    ) from None


async def prepare(body: ResponseRequest, begin: Beginning | None, catalog: Catalog, call: Call, *, again: bool = False) -> Prepared:
    """Return what the engine is asked for. Fills in the body's model and seed, so that the same body asks for the same tokens again.

    `again`: another process may have generated the response before, and may have moved the name that the body expects.
    """
    model = catalog.generator(body.model or (None if begin is None else begin.record.model))
    turns.check_model(model, begin)
    if not again:
        await turns.check_name(body, catalog, call)
    tools, calling = _tools(body)
    prompt = await turns.next_messages(model, catalog, messages_of(body), tools, "input", begin)
    format_ = body.text.format if body.text else None
    grammar = generation.format_grammar(format_.type, format_.schema_, "text.format.schema") if format_ else None
    if body.seed is None:
        body.seed = secrets.randbits(63)
    body.model = model.name
    asked = generation.requests(
        body,
        [prompt],
        model,
        call,
        max_tokens=body.max_output_tokens or catalog.settings.default_max_tokens,
        max_tokens_field="max_output_tokens",
        grammar=generation.grammar_of(body, grammar, "text.format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in body.include else None,
    )
    if body.store and not body.store_state:
        body.store_state = True
    (request,) = turns.with_states(asked, body, begin, model=model, catalog=catalog, call=call, turn="generated")
    # Streams are checked too, since their last event contains the whole answer.
    check_chat_size(model, request, catalog.settings, fields={"max_output_tokens": True, "top_logprobs": body.top_logprobs})
    only = None if calling is None else {"name": next(iter(calling.tools)) if len(calling.tools) == 1 else None}
    return Prepared(model, request, only, 0 if begin is None else begin.record.position)


def keeping(prepared: Prepared, response: str, state: str | None = None) -> Prepared:
    """Return the same, with a state that is kept once only, however many processes generate the response. `state`: its id, if it has
    one already."""
    if (keep := prepared.request.keep) is None:
        return prepared
    record = keep.record if state is None else replace(keep.record, id=state)
    # No client can send a key with a space.
    keep = replace(keep, record=record, key=IdempotencyKey(f"response {response}", ""))
    return prepared._replace(request=replace(prepared.request, keep=keep))


def work_of(body: ResponseRequest, begin: Beginning | None, prepared: Prepared, call: Call) -> dict[str, Any]:
    """Return what another process needs to generate the response: the same tokens, since the seed is part of it."""
    again = body.model_copy(update={"state": None if begin is None else begin.record.id, "max_output_tokens": prepared.request.max_tokens})
    again.previous_response_id = None
    lane = None if call.lane is None else call.lane.name
    return {"body": again.model_dump(mode="json", by_alias=True, exclude_none=True), "client": call.client, "lane": lane}


def _tools(body: ResponseRequest) -> tuple[list[dict[str, Any]], Calling | None]:
    choice = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        return choose(choice.mode, choice.tools, body.tools)
    return choose(choice, None, body.tools) if isinstance(choice, str) else choose("required", [choice], body.tools, show_all=True)
