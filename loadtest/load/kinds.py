"""The kinds of clients, as data: the user classes of `loadtest/users` and the mix of `attnserve load` take it from here."""

from typing import NamedTuple


class Kind(NamedTuple):
    """`task`: what a model must be able to do for this kind ("": anything). `share`: its weight in the default mix. `tags`: of Locust."""

    task: str
    share: int
    tags: tuple[str, ...]


# Mostly searches, a little of everything else.
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
