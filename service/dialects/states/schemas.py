"""The bodies of requests to `/v1/states`, and the answers to them."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, StrictBool, StrictInt

from service.dialects.openai import embeddings as openai
from service.dialects.states.options import EXACTNESS, STATE_REFERENCE, Exactness, KeepFields, Metadata, StateName, Ttl
from service.dialects.text.schemas import ChatMessage, TokenId
from service.http.fields import Body, Fields, schema_of
from service.http.routing import Many
from service.states.record import Origin, Status, Turn

Listed = TypeVar("Listed")

MOST_FORKS = 100
ERRORS: dict[int | str, dict[str, Any]] = {
    **openai.ERRORS,
    **{status: {"model": openai.OpenAIErrorResponse} for status in (403, 409, 410, 412)},
}


def json_body(body: type[Body]) -> dict[str, Any]:
    """Return the part of the OpenAPI document that describes a body, for a route whose signature does not contain the body's class."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(body)}}}}


class CreateState(KeepFields):
    """The body of a request for a new state. It has exactly one of the fields `prompt`, `token_ids` and `messages`."""

    model: str | None = Field(None, max_length=256, description="Default: the model of `parent`, or the first decoder.")
    prompt: str | None = Field(None, min_length=1, description="A text. After a parent, it gets no special tokens.")
    token_ids: Annotated[Many[TokenId], Field(min_length=1)] | None = None
    messages: Annotated[Many[ChatMessage], Field(min_length=1, max_length=4096)] | None = Field(
        None, description="A conversation, or its next messages after a parent."
    )
    parent: str | None = Field(None, min_length=1, max_length=256, description=f"{STATE_REFERENCE} The new state continues it.")
    exact: Exactness = Field("strict", description=EXACTNESS)


class ForkState(KeepFields):
    n: StrictInt | None = Field(None, ge=1, le=MOST_FORKS, description="Make so many, and answer with a list.")


class RewindState(KeepFields):
    """The body of a request for a state at an earlier position. It has exactly one of the fields `to`, `tokens` and `to_state`."""

    to: StrictInt | None = Field(None, ge=1, lt=2**53, description="A position: tokens that the new state has seen.")
    tokens: StrictInt | None = Field(None, ge=1, lt=2**53, description="How many tokens to go back.")
    to_state: str | None = Field(None, min_length=1, max_length=256, description="Id or name of an ancestor.")
    exact: Exactness = Field("strict", description=EXACTNESS)


class ChangeState(Fields):
    name: StateName | None = Field(None, description="A name that points to this state from now on.")
    ttl_s: Ttl | None = Field(None, description="Seconds from now after which the state expires.")
    pin: StrictBool | None = None
    metadata: Metadata | None = Field(None, description="Replaces all metadata.")


# Answers -------------------------------------------------------------------------------------------------------------------------------


class StateBytes(BaseModel):
    logical: int = Field(description="Of its blob.")
    physical: int = Field(description="Its share of the blob: states that were forked have one blob together.")


class StateNameObject(BaseModel):
    name: str
    version: int = Field(description="Grows with each move of the name, and never comes back. As ETag: `v` and the number.")


class StateUsage(BaseModel):
    prompt_tokens: int
    cached_tokens: int


class StateObject(BaseModel):
    """A state. Only some answers contain `status`, `usage` and `exact`."""

    object: Literal["state"]
    id: str
    model: str
    position: int = Field(description="Tokens that it has seen.")
    bytes: StateBytes
    fingerprint: str = Field(description="Of the model: no other one can continue it.")
    numerics: str = Field(description="Of the arithmetic that made it: machines with an equal one continue it to the same bits.")
    parent: str | None
    origin: Origin
    response: str | None = Field(description="Of the origin `response`: the id of the response that ends with this state.")
    turn: Turn = Field(description="Whose message of a conversation it ends with; generated: the model's own; empty: plain text.")
    names: list[StateNameObject]
    created: int
    expires: int | None
    pinned: bool
    metadata: dict[str, str]
    usage: StateUsage | None = Field(None, description="Only of a state that was just computed.")
    exact: bool | None = Field(None, description="Only of a state that was just computed: whether its parent has equal numerics.")


class AncestorObject(StateObject):
    status: Status
    tokens: int = Field(description="Known tokens that were fed to make it.")


class Page(BaseModel, Generic[Listed]):
    object: Literal["list"]
    data: list[Listed]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StateList(Page[StateObject]): ...


class GoneState(BaseModel):
    object: Literal["state"]
    id: str
    status: Status


class ForkList(Page[StateObject | GoneState]): ...


class Lineage(Page[AncestorObject]):
    """One page of a state's lineage: the state, its parent, and so on to its first ancestor."""


class StateDeleted(BaseModel):
    id: str
    object: Literal["state.deleted"]
    deleted: StrictBool
