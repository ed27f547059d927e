"""The states of generated texts: the state at which a text begins, the prompt after it, and the state stored after the last token."""

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
from service.errors import InvalidRequest, NameMoved
from service.generation.chat.continuation import following
from service.generation.model import Generator
from service.generation.request import GenerationRequest
from service.generation.runs import Runs
from service.states.record import Ancestor, Keep, NameChange, StateRecord, StateReference, Turn
from service.states.store import GroupingEngine

EXACT_HEADER = "x-state-exact"  # "false": a machine that rounds differently made the state, and might draw other tokens
_NEAREST = 8  # ancestors that are searched first for the last token of a state, since a fork has no tokens of its own


class Beginning(NamedTuple):
    """A state to continue. `last_token`: id of the last token that was fed to the state, None if it is unknown."""

    record: StateRecord
    last_token: int | None
    exact: Exactness

    @property
    def reference(self) -> StateReference:
        return StateReference(self.record.tenant, self.record.id, self.exact == "strict", self.record.position)


async def beginning_of(catalog: Catalog, call: Call, reference: str | None, exact: Exactness, param: str) -> Beginning | None:
    """Return the state with the id or name `reference`, or None if `reference` is None. Raises StateNotFound or StateGone."""
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


async def next_text(model: Generator, catalog: Catalog, call: Call, text: str, begin: Beginning | None) -> list[int]:
    """Return the token ids of a text. After a state the text gets no special tokens, and may be empty."""
    if begin is not None and not text:
        return []
    return await generation.encode(model, catalog, call, text, "prompt", add_special_tokens=begin is None)


async def next_messages(
    model: Generator,
    catalog: Catalog,
    call: Call,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    param: str,
    begin: Beginning | None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of a conversation, or of the next messages of a conversation after a state."""
    if begin is None or (prompts := model.chat_prompts) is None:
        return await generation.encode_chat(model, catalog, call, messages, tools, param, add_generation_prompt=add_generation_prompt)
    turn = begin.record.turn
    try:
        text = await following(prompts, messages, turn=turn, tools=tools, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        error.param = param
        raise
    ids = await generation.encode(model, catalog, call, text, param, rendered=prompts)
    return ids[1:] if turn == "generated" and ids[0] == begin.last_token else ids


def check_prompt_logprobs(prompt_logprobs: int | None, state: str | None) -> None:
    """Raise InvalidRequest if a request that continues a state asks for the log-probabilities of its prompt."""
    if prompt_logprobs is not None and state is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with state: leave one of them out", param="prompt_logprobs")


# The state after the last token ----------------------------------------------------------------------------------------------------------


async def check_name(body: StateFields, catalog: Catalog, call: Call) -> None:
    """Raise NameMoved if the version of the name in `store_state` is not the expected version. Call this before anything is computed."""
    if (change := _change(body)) is not None and change.version is not None:
        try:
            await store_of(catalog).call(lambda engine: check_version(engine, tenant_of(call), change))
        except NameMoved as error:
            error.param = "store_state.name_version"
            raise


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
    """Return the requests `asked`, with the state `begin` as their start. If the body has `store_state`, each request also gets the record
    of the state to store after its last token."""
    if begin is not None:
        asked = [replace(request, start=begin.reference) for request in asked]
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


def tell_exactness(call: Call, begin: Beginning | None, runs: Runs) -> None:
    """Set the header x-state-exact to "false" if the arithmetic of the runs' engine differs from the arithmetic that made their state."""
    if begin is not None and begin.exact == "best_effort" and begin.record.numerics != runs.runs[0].numerics:
        call.headers[EXACT_HEADER] = "false"


def kept(request: GenerationRequest) -> dict[str, Any] | None:
    """Return the JSON of the state that was stored after the request's last token, or None if the request stores no state."""
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
