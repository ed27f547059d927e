"""The kinds of clients, as data. A new kind needs its class in `loadtest/users/` and its line in `KINDS`; Locust's users, the default mix
and the choices of `--mix` follow from the line.
"""

from typing import NamedTuple


class ClientKind(NamedTuple):
    """`user`: the Locust class in `loadtest/users/`, by module and name. `task`: the task that a model must support for this kind ("":
    any). `share`: its weight in the default mix. `tags`: Locust's tags.
    """

    user: str
    task: str
    share: int
    tags: tuple[str, ...]


# With these shares, half of the default requests embed one query each.
KINDS = {
    "embed": ClientKind("embeddings.Embed", "embed", 12, ("embed", "interactive")),
    "embed_batch": ClientKind("embeddings.EmbedBatch", "embed", 1, ("embed", "bulk")),
    "embed_mixed": ClientKind("embeddings.EmbedMixed", "embed", 4, ("embed", "interactive")),
    "documents": ClientKind("embeddings.Documents", "embed", 1, ("embed", "bulk")),
    "rerank": ClientKind("embeddings.Rerank", "rerank", 2, ("rerank", "interactive")),
    "completion": ClientKind("streams.Completion", "complete", 2, ("stream", "completion")),
    "chat": ClientKind("streams.Chat", "chat", 2, ("stream", "chat")),
    "hostile": ClientKind("hostile.Hostile", "", 1, ("hostile",)),
}
