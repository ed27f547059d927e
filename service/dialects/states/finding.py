"""Finds states by id or name. Also reads the headers If-Match and If-None-Match (conditions on the version of a name) and
Idempotency-Key, and metadata in a query."""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import orjson
from fastapi import Header, Path, Request

from service.call import Call
from service.catalog import Catalog
from service.dialects.states.options import MOST_PAIRS, NAME_PATTERN
from service.errors import DocumentMoved, InvalidRequest, NameMoved, RouteNotFound, StateNotFound
from service.http.routing import on_loop
from service.states.engine import StateEngine
from service.states.record import ID, IdempotencyKey, Name, NameChange, StateRecord
from service.states.refusals import name_moved
from service.states.store import Store

P = ParamSpec("P")
Result = TypeVar("Result")

_NAME = re.compile(NAME_PATTERN.removesuffix("$"))
_TRIES = 5
_NO_NAME = ""  # looked up in place of an invalid reference, so that every refusal takes the same time
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_VERSION = re.compile(r'"v([0-9]{1,15})"')

StatePath = Annotated[str, Path(description="Id or name of a state.")]
KeyHeader = Annotated[
    str | None,
    Header(alias="Idempotency-Key", description="1 to 255 printable characters. The same key and content answer the same state for a day."),
]
MatchHeader = Annotated[str | None, Header(alias="If-Match", description='The version that the name must have, as `"v3"`; `*`: any.')]
NoneMatchHeader = Annotated[str | None, Header(alias="If-None-Match", description="`*`: the name must be new.")]


class Match(NamedTuple):
    """The headers with the version that a name must have."""

    if_match: MatchHeader = None
    if_none_match: NoneMatchHeader = None


MatchDep = Annotated[Match, on_loop(Match)]


class Found(NamedTuple):
    """A state, and its name if the request refers to the state by name."""

    record: StateRecord
    name: Name | None


def store_of(catalog: Catalog) -> Store:
    """Return the store of states. Raises NotReady while the models are loaded, and RouteNotFound if no decoder is served."""
    if catalog.states is None:
        catalog.find(None)
        raise RouteNotFound("there are no states here: they are those of decoders, and none is served")
    return catalog.states


async def on_store(
    catalog: Catalog, call: Call, work: Callable[Concatenate[StateEngine, str, P], Result], *args: P.args, **options: P.kwargs
) -> Result:
    """Return `work(engine, tenant, ..)`, run on the thread of the store, for the tenant of `call`. Raises what `store_of` does.

    If `work` raises DocumentMoved, because another process writes the same document, it is run again, `_TRIES` times in all.
    """
    tenant, store = call.tenant_name, store_of(catalog)
    for _ in range(_TRIES - 1):
        with suppress(DocumentMoved):
            return await store.call(lambda engine: work(engine, tenant, *args, **options))
    return await store.call(lambda engine: work(engine, tenant, *args, **options))


def find(engine: StateEngine, tenant: str, reference: str, param: str = "state") -> Found:
    """Return the tenant's state with this id or name. Raises StateGone or StateNotFound. StateNotFound always has the same
    text, so that it does not show whether another tenant has such a state."""
    try:
        if ID.fullmatch(reference):
            return Found(engine.get(tenant, reference), None)
        name = engine.name(tenant, reference if _NAME.fullmatch(reference) else _NO_NAME)
        return Found(engine.get(tenant, name.state), name)
    except StateNotFound:
        raise no_state(param) from None


def no_state(param: str = "state") -> StateNotFound:
    return StateNotFound("there is no such state: GET /v1/states lists what there is", param=param)


# Versions of names -----------------------------------------------------------------------------------------------------------------------


def etag(version: int) -> str:
    return f'"v{version}"'


def change_of(engine: StateEngine, tenant: str, name: str | None, match: Match) -> NameChange | None:
    """Return a change that points `name` to a state, if the name still has the version that the headers expect. Return None if `name` is
    None. Raises InvalidRequest, or NameMoved if the version is already another one."""
    if_match, if_none_match = match
    if if_none_match is not None and if_none_match.strip() != "*":
        raise InvalidRequest(f"If-None-Match={if_none_match[:80]!r} is not accepted here: only * is, for a new name", param="If-None-Match")
    if if_match is not None and if_none_match is not None:
        raise InvalidRequest("If-Match and If-None-Match contradict each other: send one of them", param="If-None-Match")
    if name is None:
        if if_match is not None or if_none_match is not None:
            raise InvalidRequest("If-Match and If-None-Match are about a name: send `name`", param="name")
        return None
    version = 0 if if_none_match is not None else None if if_match is None else _expected(engine, tenant, name, if_match.strip())
    check_version(engine, tenant, change := NameChange(name, version))
    return change


def check_version(engine: StateEngine, tenant: str, change: NameChange) -> None:
    """Raise NameMoved if the name's version is not the version that the change expects. The store checks this again during the change."""
    if change.version is None:
        return
    try:
        version = engine.name(tenant, change.name).version
    except StateNotFound:
        version = 0
    if version != change.version:
        raise name_moved(change, version)


def _expected(engine: StateEngine, tenant: str, name: str, if_match: str) -> int:
    if if_match == "*":
        try:
            return engine.name(tenant, name).version
        except StateNotFound:
            raise NameMoved(f"the name {name!r} does not exist, and the request expects that it does", param="name") from None
    if (found := _VERSION.fullmatch(if_match)) is None:
        raise InvalidRequest(f'If-Match={if_match[:80]!r} is not the version of a name, such as "v3", or *', param="If-Match")
    return int(found[1])


# Metadata in a query ---------------------------------------------------------------------------------------------------------------------


def metadata_of(request: Request) -> list[tuple[str, str]]:
    """Return the pairs `metadata[key]=value` of the request's query. Raises InvalidRequest if there are too many."""
    pairs = [(found[1], value) for key, value in request.query_params.multi_items() if (found := _METADATA.fullmatch(key))]
    if len(pairs) > MOST_PAIRS:
        raise InvalidRequest(f"the query has {len(pairs)} pairs of metadata, and a state has {MOST_PAIRS} at most", param="metadata")
    return pairs


def metadata_parameter(description: str) -> dict[str, Any]:
    """Return the description of the query's `metadata` pairs for the OpenAPI document."""
    schema = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MOST_PAIRS}
    style = {"style": "deepObject", "explode": True}
    return {"name": "metadata", "in": "query", "required": False, **style, "description": description, "schema": schema}


# Idempotency keys ------------------------------------------------------------------------------------------------------------------------


def key_of(header: str | None, route: str, *content: Any) -> IdempotencyKey | None:
    """Return the idempotency key in `header`, with a digest of the request, or None without the header.

    The order of JSON keys does not change the digest. Raises InvalidRequest if the key is invalid.
    """
    if header is None:
        return None
    if not _KEY.fullmatch(header):
        raise InvalidRequest(
            f"Idempotency-Key has {len(header)} characters and must have 1 to 255 of printable ASCII, no spaces",
            param="Idempotency-Key",
        )
    return IdempotencyKey(header, hashlib.sha256(orjson.dumps([route, *content], option=orjson.OPT_SORT_KEYS)).hexdigest())


def nth(key: IdempotencyKey | None, index: int) -> IdempotencyKey | None:
    """Return the idempotency key of the state with this index, for a request that makes several states. The keys after the first contain a
    space, so that they differ from every key that a client can send."""
    return key if key is None or not index else key._replace(key=f"{key.key} {index}")
