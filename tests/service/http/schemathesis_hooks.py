"""What schemathesis cannot draw from a schema: names of models that are served, and values that fit them. Loaded by SCHEMATHESIS_HOOKS."""

from typing import Any

import schemathesis

WIDTH = 384
MODELS = {"/rerank": "tiny-reranker", "/predict": "tiny-classifier", "/v1/attention": "tiny-classifier"}
REFUSED = {
    "/v1/embeddings": ("prompt_name", "prompt"),
    "/v1/attention": ("layers", "heads"),
    "/embed": ("prompt_name",),
    "/v2/embed": ("images", "inputs"),
}
ENCODER = "all-MiniLM-L6-v2"
STATE = "kept"  # the test makes it
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """No request asks for a text that takes longer than the client waits, whatever phase has made it."""
    body = case.body
    for fields in (body, body.get("parameters")) if isinstance(body, dict) else ():
        for name in LENGTHS if isinstance(fields, dict) else ():
            if isinstance(fields.get(name), int) and fields[name] > 16:
                fields[name] = 16


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Half of the drawn bodies pass the checks that depend on the model."""
    if isinstance(body, dict) and len(repr(body)) % 2:
        if "model" in body:
            body["model"] = MODELS.get(context.operation.path, ENCODER)
        for name in ("dimensions", "output_dimension"):
            if isinstance(body.get(name), int):
                body[name] = 8 * (1 + abs(body[name]) % (WIDTH // 8))
        for name in REFUSED.get(context.operation.path, ()):
            body.pop(name, None)
        if context.operation.path == "/v2/embed":
            body.update(input_type="search_query", texts=[text for text in body.get("texts") or () if text] or ["a"])
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if path_parameters and "model" in path_parameters:
        path_parameters["model"] = ENCODER
    if path_parameters and len(path_parameters.get("state", "")) % 2:
        path_parameters["state"] = STATE
    return path_parameters
