"""Writes `docs/fields.md`, which lists the fields of every route. Run it by `python -m service.dialects.fields_page`."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.dialects.jina import JinaRerankRequest
from service.dialects.oip.schemas import InferRequest
from service.dialects.openai.conversations import AddItems, ChangeConversation, CreateConversation
from service.dialects.openai.tokens import TokenizeRequest
from service.dialects.routers import MODULES
from service.dialects.states.schemas import ChangeState, CreateState, ForkState, RewindState
from service.dialects.tei import tokens as tei_tokens
from service.dialects.tei.schemas import TeiRerankRequest, TeiTokenizeRequest
from service.http.fields import Body, Other

# The body classes of routes that parse the body themselves, by path. The signatures of these routes do not contain the classes.
_READ_INSIDE: dict[str, tuple[type[Body], ...]] = {
    "/tokenize": (TeiTokenizeRequest, TokenizeRequest),
    "/rerank": (TeiRerankRequest, JinaRerankRequest),
    "/v2/models/{model:path}/infer": (InferRequest,),
    "/v1/conversations": (CreateConversation,),
    "/v1/conversations/{conversation_id}": (ChangeConversation,),
    "/v1/conversations/{conversation_id}/items": (AddItems,),
    "/v1/states": (CreateState,),
    "/v1/states/{state}": (ChangeState,),
    "/v1/states/{state}/fork": (ForkState,),
    "/v1/states/{state}/rewind": (RewindState,),
}

_HEAD = """# Fields of every request

Written by `python -m service.dialects.fields_page`; a test compares. The rules of every dialect:

- A null is an absent field, also in the objects inside.
- Below each route are the fields that have a use (`/docs` describes them), then those that its clients may send and that have none.
  Of these, values that change nothing are accepted: empty ones (null, false, 0, `""`, `[]`, `{}`, objects of nothing else) and those
  in the table. Others are refused by name.
- All other fields are ignored; routes that generate text, pictures or tokens, and `/v1/attention`, refuse them unless they are null, `""`,
  `[]` or `{}`."""


def page() -> str:
    paths: dict[type[Body], list[str]] = {}
    for module in (*MODULES, tei_tokens):
        for route in module.router.routes:
            if not getattr(route, "include_in_schema", True):
                continue
            for body in _bodies(route):
                paths.setdefault(body, []).append(getattr(route, "path", ""))
    return "\n\n".join([_HEAD, *(_section(body, found) for body, found in paths.items())]) + "\n"


def _bodies(route: Any) -> Iterator[type[Body]]:
    yield from _READ_INSIDE.get(getattr(route, "path", ""), ())
    for parameter in inspect.signature(getattr(route, "endpoint", page)).parameters.values():
        if inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, Body):
            yield parameter.annotation


def _section(body: type[Body], paths: list[str]) -> str:
    title = ", ".join(f"`{path}`" for path in dict.fromkeys(paths))
    used = ", ".join(f"`{field.alias or name}`" for name, field in body.model_fields.items())
    lines = [f"## {title}", "", used]
    if body.others:
        lines += ["", "| without a use | accepted | why no others |", "|---|---|---|"]
        lines += [f"| `{name}` | {_values(other)} | {other.because} |" for name, other in body.others.items()]
    return "\n".join(lines)


def _values(other: Other) -> str:
    if other.ignored:
        return "any"
    return ", ".join(["empty" if other.empty else "null", *(f"`{json.dumps(value)}`" for value in other.accepts)])


if __name__ == "__main__":
    Path("docs/fields.md").write_text(page(), encoding="utf-8")
