"""Routes with little overhead, from a validated request body to a JSON answer.

FastAPI's own handler works in Python for every request: it parses JSON into dicts, validates these, resolves dependencies, and
validates and serialises the answer. This takes time on the cores that also run the models. Here pydantic parses the bytes and
orjson writes the answer. FastAPI still makes the OpenAPI document from the signatures, and handles routes with parameters in
their paths.
"""

import asyncio
import inspect
import re
import reprlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.types import Message, Scope, Send

from service.call import Call
from service.catalog import Catalog
from service.errors import BodyTooLarge, EmptyInput, InvalidRequest, MalformedBody
from service.http.answers import WholeJson, json_answer, whole
from service.http.fields import NOT_SUPPORTED, UNKNOWN

Body = TypeVar("Body", bound=BaseModel)
Element = TypeVar("Element")

Answer = Callable[[bytes, Call, Catalog], Awaitable[Response]]

# A list in a request body. Validation stops at the first invalid element, since the list of all errors could be far larger than the body.
Many = Annotated[list[Element], Field(fail_fast=True)]

# Query parameters that every route takes: `model` names the model (`address`), and clients of Azure's OpenAI service send `api-version`.
_EVERYWHERE = ("model", "api-version")
CALL, CATALOG = "attnserve.call", "attnserve.catalog"  # keys of the call and the catalog in the ASGI scope
METHOD = "attnserve.method"  # scope key: "HEAD" for a request that is handled as GET
# Parsing JSON blocks the event loop. The time is estimated from the characters outside strings. The constants are the nanoseconds that a
# value, list, key, string or byte takes on a CPU core of 2026 in the slowest case. The slowest list has only one number. The slowest key is
# an unknown one, which costs a Python call.
_VALUE_NS, _LIST_NS, _KEY_NS, _STRING_NS, _BYTE_NS = 125, 850, 900, 120, 1.5
_LONG_DIGITS, _LONG_NS = 256, 2000  # nanoseconds per 256 digits of a long number, whose parse time grows with its length squared
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_MOST_NS = 80e6
_LARGE_BYTES = 250_000  # the cost of shorter bodies is not checked, because any such body is parsed fast
_ASIDE_BYTES = 1_000_000  # the cost of larger bodies is estimated on a thread
_MOST_ESCAPES = 2_000_000  # if a body has more backslashes, finding the ends of its strings is too slow
SHORT = reprlib.Repr()  # shortens invalid values in error messages
SHORT.maxstring = SHORT.maxother = 80
_BRANCHES = ("str", "int", "bool")  # names of union branches, which pydantic adds to an error's location


def _from_scope(name: str) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    async def value(request: Request) -> Any:  # async, because FastAPI runs a plain function on a thread
        return request.scope[name]

    return value


# The parameters that a route may have besides its body.
CallDep = Annotated[Call, Depends(_from_scope(CALL))]
CatalogDep = Annotated[Catalog, Depends(_from_scope(CATALOG))]


async def _content(request: Request) -> bytes:
    return await request.body()


ContentDep = Annotated[bytes, Depends(_content)]  # the raw body, for a route that parses it


def on_loop(kind: Callable[..., Any]) -> Any:
    """Return a dependency with the parameters of the class `kind`, made on the event loop. FastAPI would call the class on a thread."""

    async def made(**given: Any) -> Any:
        return kind(**given)

    made.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    return Depends(made)


class JsonRoute(APIRoute):
    """A route `async def name(body: SomeModel, call: CallDep, catalog: CatalogDep)` that returns JSON or a Response.

    Each parameter is optional. A route that chooses between several schemas takes `content: ContentDep`, the bytes of the body, instead of
    `body`.

    `answer(body, call, catalog)` handles a request. It is None if the signature has other parameters, which FastAPI must resolve.
    """

    answer: Answer | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        parameters = inspect.signature(endpoint).parameters
        body = next((p for p in parameters.values() if inspect.isclass(p.annotation) and issubclass(p.annotation, BaseModel)), None)
        if set(parameters) - {"call", "catalog", "content"} - ({body.name} if body else set()):
            return self._with_query(super().get_route_handler())

        taken = [name for name in ("content", "call", "catalog") if name in parameters]

        async def answer(content: bytes, call: Call, catalog: Catalog) -> Response:
            if len(content) > _ASIDE_BYTES and (body is not None or "content" in taken):
                await asyncio.to_thread(_check_cost, content)
                call.body_checked = True
            given = {"content": content, "call": call, "catalog": catalog}
            arguments: dict[str, Any] = {name: given[name] for name in taken}
            if body is not None:
                arguments[body.name] = read(body.annotation, content, call)
            result = await endpoint(**arguments)
            return result if isinstance(result, Response) else json_response(result, call)

        async def handle(request: Request) -> Response:
            return await answer(await request.body(), request.scope[CALL], request.scope[CATALOG])

        self.answer = answer
        return handle

    def _with_query(self, handle: Callable[[Request], Coroutine[Any, Any, Response]]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return `handle`, preceded by a check of the query's names if the route takes a query."""
        described = (self.openapi_extra or {}).get("parameters", ())
        objects = [parameter["name"] for parameter in described if parameter["in"] == "query"]  # sent as NAME[key]=value
        declared = (self.dependant, *self.dependant.dependencies)
        names = sorted({*(parameter.alias for each in declared for parameter in each.query_params), *objects})
        if not names:
            return handle

        async def checked(request: Request) -> Response:
            for name in request.query_params:
                known = name in (*names, *_EVERYWHERE) or f"{name}[]" in names or name.partition("[")[0] in objects
                if not known:
                    shown = SHORT.repr(name).strip("'")
                    raise InvalidRequest(f"unknown query parameter `{shown}`: this route takes {', '.join(names)}", param=shown)
            return await handle(request)

        return checked


def exact(routers: Iterable[APIRouter]) -> dict[tuple[str, str], JsonRoute]:
    """Return the routes without path parameters, by method and path. The edge calls them without FastAPI's middleware."""
    return {
        (method, route.path): route
        for router in routers
        for route in router.routes
        if isinstance(route, JsonRoute) and route.answer is not None and "{" not in route.path
        for method in route.methods or ()
    }


def allowed(path: str, routers: Iterable[APIRouter]) -> list[str]:
    """Return the methods that are allowed for this path, sorted, or an empty list if the path is unknown."""
    routes = (route for router in routers for route in router.routes if isinstance(route, JsonRoute))
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods | {"OPTIONS"}) if methods else []


def canonical(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Normalise a request: remove a slash at the end of the path, and handle HEAD as a GET without sending the answer's body."""
    path: str = scope["path"]
    if len(path) > 1 and path.endswith("/"):
        scope = {**scope, "path": path[:-1]}
    if scope["method"] != "HEAD":
        return scope, send

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return {**scope, "method": "GET", METHOD: "HEAD"}, send_head


_ADDRESSED = re.compile(
    r"/models/(.+?)(/(?:embed|embed_all|embed_sparse|similarity|rerank|predict|tokenize|decode|info|generate|generate_stream"
    r"|(?:v1/)?embeddings|v1/completions|v1/chat/completions))?"
)


def address(scope: MutableMapping[str, Any]) -> tuple[str | None, bool]:
    """Return the model that the URL names, or None, and whether the name is in the path (else in the query: `?model=NAME`).

    The name is removed from the path: `/models/NAME/embed` becomes `/embed`, and `/models/NAME` becomes `/`.
    """
    if (found := _ADDRESSED.fullmatch(scope["path"])) is not None:
        scope["path"] = found[2] or "/"
        return found[1], True
    named = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return named[-1] if named else None, False


def read(model: type[Body], body: bytes, call: Call | None = None) -> Body:
    """Return the parsed body. Raises BodyTooLarge, MalformedBody, EmptyInput, or InvalidRequest with the name of the invalid field.

    `call.wanted` is the model that the URL names. It becomes the body's `model` if the body has none. A name in the URL's path replaces the
    body's `model` even if the body has one.
    """
    if len(body) > _LARGE_BYTES and not (call is not None and call.body_checked):
        _check_cost(body)
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _sentence(error) from None
    if call is not None and call.wanted is not None and hasattr(parsed, "model") and (call.by_path or not parsed.model):
        parsed.model = call.wanted
    return parsed


def _check_cost(body: bytes) -> None:
    """Raise BodyTooLarge if parsing would block the event loop for too long. Commas and brackets in strings do not count."""
    ns, counted = _cost(body, body.count(b'"'), len(body))
    if ns > _MOST_NS and (escapes := body.count(b"\\")) <= _MOST_ESCAPES:
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if escapes else body
        quotes = plain.count(b'"')
        if quotes * _STRING_NS / 2 <= _MOST_NS:
            ns, counted = _cost(b"".join(plain.split(b'"')[::2]), quotes, len(body))
    if ns > _MOST_NS:
        raise BodyTooLarge(
            f"the body has about {counted}, which would take {ns / 1e9:.2f} s to read, and the most is {_MOST_NS / 1e9:.2f} s: "
            "send it in parts"
        )


def _cost(structure: bytes, quotes: int, size_bytes: int) -> tuple[float, str]:
    """Return the estimated nanoseconds for parsing a JSON text of `size_bytes`, and in words the counts that they follow from.
    `structure`: the text, without its strings if they could be removed."""
    lists, values, keys = structure.count(b"["), structure.count(b","), structure.count(b":")
    long = structure.translate(_ZEROS).count(b"0" * _LONG_DIGITS)
    ns = lists * _LIST_NS + values * _VALUE_NS + keys * _KEY_NS + long * _LONG_NS + quotes * _STRING_NS / 2 + size_bytes * _BYTE_NS
    return ns, f"{lists} lists, {values} values, {keys} keys and {long * _LONG_DIGITS} digits of very long numbers"


def json_response(content: Any, call: Call, status: int = 200) -> Response:
    """Return a response with `content`, which may contain numpy arrays. A large answer, for which
    `call.answer_bytes` is set, is sent in pieces."""
    if call.answer_bytes:
        return json_answer(content, call.headers, status)
    return WholeJson(whole(content), call.headers, status)


def _sentence(error: ValidationError) -> InvalidRequest:
    """Convert the most helpful of pydantic's errors to a sentence.

    For a field with several possible types, pydantic has errors for each type. The most helpful one is of a type that fits the value, and
    of the deepest element in it.
    """
    problems = error.errors(include_url=False)
    if problems[0]["type"] == "json_invalid":
        return MalformedBody(f"the body is not JSON: {problems[0]['msg']}")
    first = max(problems, key=_fitness) if len(problems) > 1 else problems[0]
    field = ".".join(_names(first["loc"])) or "body"
    if first["type"] in (UNKNOWN, NOT_SUPPORTED):
        named = ".".join([*_names(first["loc"]), SHORT.repr(first["ctx"]["field"]).strip("'")])
        return InvalidRequest(f"`{named}` {first['msg']}", param=named)
    if first["input"] is None and not field.rpartition(".")[2].isdecimal():  # in a list, null is a value
        return InvalidRequest(f"`{field}`: Field required: null is the same as leaving it out", param=field)
    if first["type"] in ("too_short", "string_too_short"):
        return EmptyInput(f"`{field}` cannot be empty", param=field)
    given = "" if first["type"] == "missing" else f". Given: {SHORT.repr(first['input'])}"
    return InvalidRequest(f"`{field}`: {first['msg']}{given}", param=field)


def _names(loc: Sequence[int | str]) -> list[str]:
    """Return the names and numbers of fields, list elements and token ids, without pydantic's names of types."""
    return [str(part) for part in loc if isinstance(part, int) or part.isdecimal() or (part.isidentifier() and part not in _BRANCHES)]


def _fitness(problem: Any) -> tuple[bool, int, int]:
    loc = problem["loc"]
    return not problem["type"].endswith("_type"), sum(isinstance(part, int) for part in loc), len(_names(loc))
