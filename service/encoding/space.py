"""Embedding spaces: two vectors can be compared only if the same weights and the same settings made both.

The id of a space is 16 hex digits of all that changes vectors, and of nothing else. So bundles of the same weights on a CPU and a GPU share
it, and a bundle in int8 has another one. The requested number format is not part of it.
"""

from hashlib import sha256

from export import contract
from service.call import SPACE_MATCH_HEADER as MATCH_HEADER
from service.errors import SpaceMoved

SPACE_HEADER = "x-embedding-space"
_CHANGING = {"precision", "limits", "pooling", "normalized", "width", "prompts", "default_prompt", "roles", "sparse", "multivector"}


def space_of(manifest: contract.Manifest, tensor: str, dimensions: int | None = None) -> str:
    """Return the id of the space of an output of the graph. `dimensions`: how many numbers of a vector are kept; None: all of them."""
    tokenizer = next(file.sha256 for file in manifest.files if file.name == contract.TOKENIZER)
    short = manifest.short_graph
    facts = (
        tensor,
        None if dimensions == manifest.width else dimensions,
        tokenizer,
        manifest.source.weights_sha256,
        manifest.source.attention,
        None if short is None else (short.attention, short.max_tokens),
        [trial.recipe for trial in manifest.trials if trial.kept],
        manifest.model_dump_json(include=_CHANGING),
    )
    return sha256(repr(facts).encode()).hexdigest()[:16]


def check_space(wanted: str, spaces: list[str], model: str) -> None:
    """Raise SpaceMoved unless the answer's spaces are those that a client names in `MATCH_HEADER`, separated by commas."""
    if missing := {each.strip() for each in wanted.split(",")} - set(spaces):
        raise SpaceMoved(
            f"{MATCH_HEADER}={wanted!r:.100}: model {model} now gives vectors of the space {', '.join(spaces)}, which cannot be compared "
            f"with those of {', '.join(sorted(missing))!s:.100}. Embed your documents again, or name the model that made them",
            param=MATCH_HEADER,
        )
