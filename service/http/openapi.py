"""Corrects the OpenAPI document for generators of client code.

FastAPI derives the document from the routes. Generators fail on several schemas with one title, on enum members that become equal names,
on a type that is only null, on defaults, and on an error schema that is never sent. This module corrects these, and adds examples and
the API key.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from service.http.content_encoding import ACCEPTED
from service.http.gate import OPEN

DESCRIPTION = (
    "Attention models over HTTP: embeddings and rerank scores from encoders, text from decoders, in the forms of OpenAI, "
    "text-embeddings-inference, Cohere, Jina and the Open Inference Protocol. `model` may be left out: the first model that fits answers."
)
_JSON = "application/json"
_TEXT = "Attention is all you need"
_QUESTION, _DOCUMENTS = "What is the capital of France?", ["Paris is the capital of France.", "Fish swim."]
_CODE = "def mean(values):\n"
_CONVERSATION = [{"role": "user", "content": "Write a function that adds two numbers."}]

# A valid request body for each route, without the field `model`.
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [_TEXT, "Paris is in France"]},
    "/embeddings": {"input": _TEXT},
    "/v1/chat/completions": {"messages": _CONVERSATION, "max_tokens": 32},
    "/v1/completions": {"prompt": _CODE, "max_tokens": 32, "temperature": 0.5},
    "/v1/responses": {"input": "Write a function that adds two numbers.", "max_output_tokens": 32},
    "/v1/responses/input_tokens": {"input": "Write a function that adds two numbers."},
    "/v1/images/generations": {"prompt": "7"},
    "/v1/conversations": {"items": [{"role": "system", "content": "Answer in one word."}], "metadata": {"topic": "statistics"}},
    "/v1/conversations/{conversation_id}": {"metadata": {"topic": "means"}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "What is a median?"}]},
    "/v1/states": {"prompt": _CODE, "ttl_s": 3600, "metadata": {"topic": "statistics"}},
    "/v1/states/{state}": {"metadata": {"topic": "means"}},
    "/v1/states/{state}/fork": {"ttl_s": 3600},
    "/v1/states/{state}/rewind": {"tokens": 1, "ttl_s": 3600},
    "/v1/attention": {"input": "The cat sat.", "layers": [-1], "average_heads": True},
    "/v1/rerank": {"query": _QUESTION, "documents": _DOCUMENTS, "top_n": 1},
    "/encode": {"texts": _DOCUMENTS, "input_type": "document", "pool_factor": 2},
    "/rerank_with_encoding": {"query": _QUESTION, "documents": _DOCUMENTS},
    "/pooling": {"input": [_TEXT], "task": "embed"},
    "/score": {"text_1": _QUESTION, "text_2": _DOCUMENTS},
    "/v1/score": {"text_1": _QUESTION, "text_2": _DOCUMENTS},
    "/v2/rerank": {"query": _QUESTION, "documents": _DOCUMENTS, "top_n": 1},
    "/v2/embed": {"input_type": "search_query", "texts": [_TEXT], "embedding_types": ["float"]},
    "/embed": {"inputs": [_TEXT, "Paris is in France"]},
    "/embed_all": {"inputs": _TEXT},
    "/embed_sparse": {"inputs": _TEXT},
    "/v1/contextualizedembeddings": {"inputs": [["Attention is a kernel.", "So it can be linear."]]},
    "/similarity": {"inputs": {"source_sentence": "The cat sat.", "sentences": ["A cat was sitting.", "Stocks fell."]}},
    "/rerank": {"query": _QUESTION, "texts": _DOCUMENTS},
    "/predict": {"inputs": "I like this."},
    "/": {"inputs": _TEXT},
    "/invocations": {"inputs": _TEXT},
    "/tokenize": {"inputs": _TEXT},
    "/detokenize": {"tokens": [100, 101, 102]},
    "/decode": {"ids": [101, 2054, 102]},
    "/v1/embed": {"texts": [_TEXT], "input_type": "search_query"},
    "/generate": {"inputs": _CODE, "parameters": {"max_new_tokens": 32}},
    "/generate_stream": {"inputs": _CODE, "parameters": {"max_new_tokens": 32}},
    "/v2/models/{model}/infer": {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [_TEXT]}]},
}
_PARAMETERS = {
    "model": "all-MiniLM-L6-v2",
    "response_id": "resp_0123456789abcdef",
    "conversation_id": "conv_0123456789abcdef",
    "item_id": "msg_0123456789abcdef",
    "run": "run_0123456789abcdef0123456789abcdef",
    "state": "state_0123456789abcdef0123456789abcdef",
}


def refined(document: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """Correct `document` in place and return it. `needs_key`: whether requests need an API key."""
    document["servers"] = [{"url": "/", "description": "The service that sent this document."}]
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    _name(document)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        _mend(schema)
    for path, method, operation in _operations(document):
        _mend(operation)
        operation["summary"] = _first_sentence(operation["description"])  # FastAPI's is the function's name, which does not say of what
        _answers(operation, has_body=method in ("post", "put", "patch"))
        _exemplify(path, operation)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _secure(document, needs_key)
    return document


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"\.(?:\s|$)", text, maxsplit=1)[0].split())


# Names -----------------------------------------------------------------------------------------------------------------------------------


def _name(document: dict[str, Any]) -> None:
    """Give every schema a name of only letters and digits, and use that name as its title."""
    old = document["components"]["schemas"]
    assert not any("__" in name for name in old), "two schemas have one name"  # FastAPI adds the module and "__" to equal names
    names = {name: re.sub(r"[^A-Za-z0-9]", "", name) for name in old}
    _refer(document, {f"#/components/schemas/{name}": f"#/components/schemas/{plain}" for name, plain in names.items()})
    document["components"]["schemas"] = {names[name]: {**schema, "title": names[name]} for name, schema in sorted(old.items())}


def _refer(node: Any, names: dict[str, str]) -> None:
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _refer(value, names)
    if isinstance(node, dict) and isinstance(node.get("$ref"), str):
        node["$ref"] = names[node["$ref"]]


# Schemas ---------------------------------------------------------------------------------------------------------------------------------


def _mend(node: Any) -> None:
    """Correct every schema inside `node`, a part of the document. The schema `node` itself keeps its title."""
    if isinstance(node, list):
        for each in node:
            _mend(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("example", "examples", "default", "enum", "const", "mapping"):
                continue  # the content of these keys is values, not schemas
            if key == "properties":
                for schema in value.values():
                    _mend_schema(schema)
            elif isinstance(value, dict) and key in ("items", "additionalProperties", "schema", "not"):
                _mend_schema(value)
            elif isinstance(value, list) and key in ("anyOf", "oneOf", "allOf", "prefixItems"):
                for schema in value:
                    _mend_schema(schema, alone=False)
            else:
                _mend(value)


def _mend_schema(schema: dict[str, Any], *, alone: bool = True) -> None:
    schema.pop("title", None)  # pydantic's title repeats the field's name, so several schemas have the same title
    if "default" in schema:  # moved to the description, since generators would require the field, or always send it
        default = schema.pop("default")
        if default not in (None, [], {}):
            schema["description"] = f"{schema.get('description', '')} Default: {json.dumps(default)}.".strip()
    if schema.get("type") == "null" and alone:  # generators do not support a value that is always null
        del schema["type"]
        schema["anyOf"] = [{"type": "string"}, {"type": "null"}]
    if "enum" in schema:
        kept = {re.sub(r"[^a-z0-9]", "", str(value).lower()) or str(value): value for value in reversed(schema["enum"])}
        if len(kept) < len(schema["enum"]):
            schema["enum"] = list(reversed(kept.values()))
            schema["description"] = f"{schema.get('description', '')} Capital and small letters mean the same.".strip()
    _mend(schema)


# Operations ------------------------------------------------------------------------------------------------------------------------------


def _answers(operation: dict[str, Any], *, has_body: bool) -> None:
    """Remove FastAPI's own answer 422, which is never sent. Describe streams, and the errors 408 and 415 of requests with a body."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    for answer in responses.values():
        if (events := answer.get("content", {}).get("text/event-stream")) is not None:
            events.setdefault("schema", {"description": "An event: `data: {..}`, and an empty line."})
    if has_body and "413" in responses:
        refused = {
            "408": {**responses["413"], "description": "Request Timeout: the body stopped on its way, or came too slowly"},
            "415": {**responses["413"], "description": f"Unsupported Media Type: a content-encoding other than {ACCEPTED}"},
        }
        operation["responses"] = dict(sorted({**responses, **refused}.items()))


def _exemplify(path: str, operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in _PARAMETERS:
            parameter["example"] = _PARAMETERS[parameter["name"]]
    content = operation.get("requestBody", {}).get("content", {})
    if _JSON in content and path in EXAMPLES:
        content[_JSON]["example"] = EXAMPLES[path]


def _secure(document: dict[str, Any], needs_key: bool) -> None:
    """Describe the API key in the document, so that generated clients can send one. It is required only if `needs_key` is true."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of the service, where it has any."}
    }
    if not needs_key:
        return
    document["security"] = [{"bearer": []}]
    for path, method, operation in _operations(document):
        if path.startswith(OPEN) or (path == "/" and method == "get"):
            operation["security"] = []
