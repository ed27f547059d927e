"""The kinds of clients, as data: the user classes of `loadtest/users` and the mix of `attnserve load` take it from here."""

from typing import NamedTuple


class Kind(NamedTuple):
    """`task`: what a model must be able to do for this kind ("": anything). `share`: its weight in the default mix."""

    task: str
    share: int


# Mostly searches, a little of everything else.
KINDS = {
    "embed": Kind("embed", 12),
    "embed_batch": Kind("embed", 1),
    "embed_mixed": Kind("embed", 4),
    "documents": Kind("embed", 1),
    "rerank": Kind("rerank", 2),
    "completion": Kind("complete", 2),
    "chat": Kind("chat", 2),
    "hostile": Kind("", 1),
}
