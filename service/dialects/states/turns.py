"""States of generated texts: where a text begins, what of its prompt is new, and how the state after its last token is kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from service.call import Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.states.finding import check_version, find, store_of, tenant_of
from service.dialects.states.keeping import new_record, quota_of
from service.dialects.states.options import Exactness, StateFields, StoreState
from service.errors import InvalidRequest
from service.generation.chat.continuation import following
from service.generation.model import Generator
from service.generation.request import GenerationRequest
from service.states.record import Ancestor, Keep, NameChange, StateRecord, StateReference, Turn
from service.states.store import GroupingEngine

EXACT_HEADER = "x-state-exact"  # "false": the state is of a machine with other arithmetic, so tokens may differ from those it would draw
_NEAREST = 8  # ancestors that are looked at first for the last token of a state: forks have no tokens of their own


class Beginning(NamedTuple):
    """A state to continue. `last_token`: the last that it has seen, None if that is not known."""

    record: StateRecord
    last_token: int | None
    exact: Exactness

    @property
    def reference(self) -> StateReference:
        return StateReference(self.record.tenant, self.record.id, self.exact == "strict")


async def beginning_of(catalog: Catalog, call: Call, reference: str | None, exact: Exactness, param: str) -> Beginning | None:
    """Return the state with this id or name, or None without one. Raises StateNotFound or StateGone."""
    if reference is None:
        return None
    tenant = tenant_of(call)

    def found(engine: GroupingEngine) -> Beginning:
        record = find(engine, tenant, reference, param).record
        last = _last_token(engine.lineage(tenant, record.id, _NEAREST))
        return Beginning(record, _last_token(engine.lineage(tenant, record.id)) if last is None else last, exact)

    return await store_of(catalog).call(found)


def _last_token(line: Sequence[Ancestor]) -> int | None:
    return next((int(np.frombuffer(each.ids, "<i4")[-1]) for each in line if each.ids), None)


def check_model(model: Generator, begin: Beginning | None) -> None:
    """Raise InvalidRequest if the model is not the one that made the state."""
    if begin is not None and begin.record.fingerprint != model.manifest.fingerprint:
        raise InvalidRequest(
            f"the state is of model {begin.record.model} with the fingerprint {begin.record.fingerprint[:12]}, and model {model.name} "
            f"has {model.manifest.fingerprint[:12]}: only the same model can continue it",
            param="model",
        )


# The new part of a prompt ----------------------------------------------------------------------------------------------------------------


async def next_text(model: Generator, catalog: Catalog, text: str, begin: Beginning | None) -> list[int]:
    """Return the ids of a text. After a state it has no special tokens, and may be empty."""
    if begin is not None and not text:
        return []
    return await generation.encode(model, catalog, text, "prompt", add_special_tokens=begin is None)


async def next_messages(
    model: Generator,
    catalog: Catalog,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    param: str,
    begin: Beginning | None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the ids of a conversation, or of its next messages after a state."""
    if begin is None or (prompts := model.chat_prompts) is None:
        return await generation.encode_chat(model, catalog, messages, tools, param, add_generation_prompt=add_generation_prompt)
    turn = begin.record.turn
    try:
        text = await following(prompts, messages, turn=turn, tools=tools, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        error.param = param
        raise
    ids = await generation.encode(model, catalog, text, param, rendered=prompts)
    return ids[1:] if turn == "generated" and ids[0] == begin.last_token else ids


def check_prompt_logprobs(prompt_logprobs: int | None, state: str | None) -> None:
    """Raise InvalidRequest for log-probabilities of a prompt that continues a state."""
    if prompt_logprobs is not None and state is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with state: leave one of them out", param="prompt_logprobs")


# The state after the last token ----------------------------------------------------------------------------------------------------------


async def check_name(body: StateFields, catalog: Catalog, call: Call) -> None:
    """Raise NameMoved before anything is computed, if the name has another version than the request expects."""
    if (change := _change(body)) is not None and change.version is not None:
        await store_of(catalog).call(lambda engine: check_version(engine, tenant_of(call), change))


def _change(body: StateFields) -> NameChange | None:
    asked = body.store_state
    return NameChange(asked.name, asked.name_version) if isinstance(asked, StoreState) and asked.name is not None else None


def with_states(
    asked: Sequence[GenerationRequest],
    body: StateFields,
    begin: Beginning | None,
    *,
    model: Generator,
    catalog: Catalog,
    call: Call,
    turn: Turn,
) -> list[GenerationRequest]:
    """Return the requests with the state at which they begin, and with a state to keep for each of them if the body asks for that."""
    if begin is not None:
        asked = [replace(request, start=begin.reference) for request in asked]
        if begin.exact == "best_effort" and begin.record.numerics != model.engine.numerics:
            call.headers[EXACT_HEADER] = "false"
    if not body.store_state:
        return list(asked)
    options = body.store_state if isinstance(body.store_state, StoreState) else StoreState.model_validate({})
    change = _change(body)
    if change is not None and len(asked) > 1:
        raise InvalidRequest(f"one name cannot point to the states of {len(asked)} texts: leave it out", param="store_state.name")
    if options.name_version is not None and change is None:
        raise InvalidRequest("name_version is about a name: send `store_state.name`", param="store_state.name_version")
    if catalog.states is None:
        store_of(catalog)
    quota = quota_of(catalog.settings)

    def keep() -> Keep:
        record = new_record(
            options,
            catalog.settings,
            tenant=tenant_of(call),
            model=model.name,
            fingerprint=model.manifest.fingerprint,
            parent=None if begin is None else begin.record.id,
            origin="prompt" if begin is None else "continuation",
            turn=turn,
        )
        return Keep(record=record, quota=quota, name=change)

    return [replace(request, keep=keep()) for request in asked]


def kept(request: GenerationRequest) -> dict[str, Any] | None:
    """Return the state that was kept after the request's last token as JSON, or None."""
    if (keep := request.keep) is None:
        return None
    record = keep.record
    return {
        "object": "state",
        "id": record.id,
        "parent": record.parent,
        "name": None if keep.name is None else keep.name.name,
        "expires": None if record.expires is None else int(record.expires),
    }
