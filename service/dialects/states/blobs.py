"""Routes that return the bytes of a state, as a whole or a part, and that store a state from its bytes."""

import asyncio
import hashlib
import math
import re
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Header, Query, Request, Response

from service.catalog import Catalog
from service.dialects.openai import embeddings as openai
from service.dialects.states.finding import (
    KeyHeader,
    MatchDep,
    StatePath,
    change_of,
    find,
    key_of,
    metadata_of,
    metadata_parameter,
    on_store,
)
from service.dialects.states.options import KeepFields
from service.dialects.states.records import described, new_record, quota_of, replayed, sent
from service.dialects.states.schemas import ERRORS, StateObject
from service.errors import InvalidRequest, RangeRefused
from service.generation.model import DecoderModel
from service.http.gate import refused
from service.http.routing import CallDep, CatalogDep, ContentDep, JsonRoute, read
from service.states.blob import read_header, unpack
from service.states.engine import StateEngine
from service.states.record import StateRecord

SAFETENSORS = "application/octet-stream"  # a media type that clients generated from the OpenAPI document can read
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")
_MOST_POSITION = 2**53 - 1  # JSON clients round larger numbers. This leaves room to continue the state, up to positions of 18 digits
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The state as a file in the format safetensors.", "content": {SAFETENSORS: _BINARY}},
    206: {"description": "The part that `Range` names.", "content": {SAFETENSORS: _BINARY}},
    304: {"description": "The client has these bytes."},
    416: {"model": openai.OpenAIErrorResponse},
}
_UPLOAD = {
    "requestBody": {"required": True, "content": {SAFETENSORS: _BINARY, "application/octet-stream": _BINARY}},
    "parameters": [metadata_parameter("`metadata[key]=value`: a pair that is kept with the state.")],
}

router = APIRouter(route_class=JsonRoute, tags=["States"], responses=ERRORS)


@router.get("/v1/states/{state}/blob", response_class=Response, responses=_ANSWERS)
async def blob(
    state: StatePath,
    call: CallDep,
    catalog: CatalogDep,
    range_: Annotated[str | None, Header(alias="Range", description="One range of bytes, as `bytes=0-1023`.")] = None,
    if_range: Annotated[str | None, Header(alias="If-Range")] = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> Response:
    """Return the bytes of a state. The ETag is the SHA-256 of the bytes, so forks have the same ETag."""

    def found(engine: StateEngine, tenant: str) -> tuple[StateRecord, bytes | None]:
        record = find(engine, tenant, state).record
        return record, None if _known(record, if_none_match) else engine.blob(tenant, record.id)

    record, content = await on_store(catalog, call, found)
    headers = {"etag": f'"{record.sha256}"', "accept-ranges": "bytes", "cache-control": "private, no-cache"}
    if content is None:
        return Response(status_code=304, headers={**call.headers, **headers})
    catalog.expect(call, len(content), "the bytes of a state")
    if range_ is None or if_range not in (None, headers["etag"]) or (wanted := _range(range_, len(content))) is None:
        return Response(content, 200, {**call.headers, **headers}, SAFETENSORS)
    first, end = wanted
    if first >= end:
        error = RangeRefused(f"Range={range_[:80]!r} is outside of the {len(content)} bytes of the state", param="Range")
        answer = refused(error, openai.DIALECT)
        answer.headers["content-range"] = f"bytes */{len(content)}"
        return answer
    headers["content-range"] = f"bytes {first}-{end - 1}/{len(content)}"
    return Response(content[first:end], 206, {**call.headers, **headers}, SAFETENSORS)


def _known(record: StateRecord, if_none_match: str | None) -> bool:
    """Return whether the header If-None-Match says that the client has the bytes of this state."""
    same = ("*", f'"{record.sha256}"', f'W/"{record.sha256}"')
    return if_none_match is not None and any(each.strip() in same for each in if_none_match.split(","))


def _range(header: str, size: int) -> tuple[int, int] | None:
    """Return the range's first byte and its end (exclusive). Return None for a header that must be ignored because it has
    another unit, several ranges or no range."""
    if (found := _RANGE.fullmatch(header.strip())) is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        return max(size - int(found[2]), 0) if int(found[2]) else size, size
    first, last = int(found[1]), int(found[2]) if found[2] else size - 1
    return None if found[2] and last < first else (first, min(last + 1, size))


@router.put("/v1/states/blob", response_model=StateObject, openapi_extra=_UPLOAD)
async def upload(
    request: Request,
    content: ContentDep,
    call: CallDep,
    catalog: CatalogDep,
    match: MatchDep,
    name: Annotated[str | None, Query(description="A name that points to the state from now on.")] = None,
    ttl_s: Annotated[str | None, Query(description="Seconds after which the state expires, or never.")] = None,
    pin: Annotated[bool, Query(description="A pinned state is never evicted.")] = False,
    idempotency_key: KeyHeader = None,
) -> Any:
    """Store a state from its bytes. Bytes that are not exactly a state of a model served here are refused, and nothing is written."""
    given = {"name": name, "ttl_s": _seconds(ttl_s), "pin": pin, "metadata": dict(metadata_of(request))}
    options, settings = read(KeepFields, orjson.dumps(given)), catalog.settings
    digest = await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest())
    key = key_of(idempotency_key, "upload", digest, given, *match)
    if key is not None and (earlier := await on_store(catalog, call, replayed, key)) is not None:
        return sent(earlier, call, replayed=True, name=options.name)
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise InvalidRequest("the body is multipart, and a state is the body itself: send the file alone, as curl --data-binary @FILE does")
    model = _model_of(content, catalog)
    decoder = model.manifest.decoder
    assert decoder is not None
    whole = await asyncio.to_thread(unpack, content, decoder, model.manifest.limits.vocab_size, model.manifest.fingerprint)
    if whole.position > _MOST_POSITION:
        raise InvalidRequest(
            f"the state has the position {whole.position}, and the most is {_MOST_POSITION}: upload the state again, unchanged"
        )
    record = new_record(
        options,
        settings,
        tenant=call.tenant_name,
        model=model.name,
        fingerprint=whole.fingerprint,
        parent=None,
        origin="upload",
        turn="",
        position=whole.position,
        numerics=whole.numerics,
    )
    ids = np.array(whole.recent, "<i4").tobytes()

    def kept(engine: StateEngine, tenant: str) -> tuple[dict[str, Any], bool]:
        change = change_of(engine, tenant, options.name, match)
        made = engine.put(record, content, ids=ids, quota=quota_of(settings), name=change, key=key)
        return described(engine, made), made.id != record.id

    made, again = await on_store(catalog, call, kept)
    return sent(made, call, replayed=again, name=options.name)


def _seconds(ttl_s: str | None) -> float | str | None:
    """Return the number of seconds, or None. Text that is not a finite number is returned unchanged: the schema accepts or rejects it."""
    try:
        seconds = math.nan if ttl_s is None else float(ttl_s)
    except ValueError:
        return ttl_s
    return seconds if math.isfinite(seconds) else ttl_s


def _model_of(content: bytes, catalog: Catalog) -> DecoderModel:
    """Return the served model that made the state, found by its fingerprint. Raises InvalidRequest if there is none."""
    header = read_header(content)
    fingerprint = header.metadata["fingerprint"]
    for name, model in catalog.generators.items():
        if model.manifest.fingerprint == fingerprint and model.manifest.decoder is not None:
            return catalog.generator(name)
    raise InvalidRequest(
        f"the state is of model {header.model} with the fingerprint {fingerprint[:12]}, which is not served here: only the model that made "
        "a state can continue it"
    )
