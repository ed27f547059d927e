"""Queries and documents in every dialect's own words: `input_type`, `task` or the name of a prompt."""

from typing import Literal

from export import contract
from service.encoding.model import Model

InputType = Literal[
    "query", "document", "passage", "search_query", "search_document", "classification", "clustering", "text-matching", "separation"
]
JinaTask = Literal["retrieval.query", "retrieval.passage", "text-matching", "classification", "separation"]
Asked = tuple[int | None, str | None]  # `queries` and `prompt` of an `EncodeRequest`

_ROLES: dict[str, contract.RoleName] = {
    **dict.fromkeys(("query", "search_query", "retrieval.query"), "query"),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), "document"),
}


def as_role(
    model: Model, n_inputs: int, input_type: str | None = None, *, prompt_name: str | None = None, prompt: str | None = None
) -> Asked:
    """Return how the inputs of a request are written, which has a type for all of them or none.

    A prompt that the request names takes the place of that of the role. The name of a role, or of its prompt, chooses the role too.
    """
    texts = model.texts
    role = _ROLES.get(input_type or "")
    if prompt is None and prompt_name:
        named = texts.role_of(prompt_name)
        role = role or named
        prompt = None if named and prompt_name not in texts.prompts else texts.prompt(prompt_name)
    elif prompt is None and input_type and role is None:
        prompt = texts.prompt_of(input_type)
    return None if role is None else n_inputs if role == "query" else 0, prompt


def prompt_of(model: Model, input_type: str | None, *, prompt_name: str | None = None, prompt: str | None = None) -> str:
    """Return the prompt alone."""
    queries, own = as_role(model, 1, input_type, prompt_name=prompt_name, prompt=prompt)
    if own is not None or queries is None:
        return model.texts.default_prompt if own is None else own
    return model.texts.prompt_of("query" if queries else "document")
