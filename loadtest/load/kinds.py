"""The kinds of clients, as data. The user classes of `loadtest/users` and the mix of `attnserve load` are defined from it."""

from typing import NamedTuple


class Kind(NamedTuple):
    """`task`: the task that a model must support for this kind ("": any). `share`: its weight in the default mix. `tags`: Locust's tags."""

    task: str
    share: int
    tags: tuple[str, ...]


# By default most requests are embeddings of one query.
KINDS = {
    "embed": Kind("embed", 12, ("embed", "interactive")),
    "embed_batch": Kind("embed", 1, ("embed", "bulk")),
    "embed_mixed": Kind("embed", 4, ("embed", "interactive")),
    "documents": Kind("embed", 1, ("embed", "bulk")),
    "rerank": Kind("rerank", 2, ("rerank", "interactive")),
    "completion": Kind("complete", 2, ("stream", "completion")),
    "chat": Kind("chat", 2, ("stream", "chat")),
    "hostile": Kind("", 1, ("hostile",)),
}
