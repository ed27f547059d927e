"""The texts of an attention transfer: beginnings of long documents, Python files and documentation in turns.

DATA is a folder that `models.training.collect` wrote. Its documents are ordered by hash, so the first ones are a random sample.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from models.training.corpus import CorpusError, TextDocument, read_texts

BYTES = 2  # a document with fewer bytes for each token of the context is not tokenized; code and prose have 2.5 to 4.5


def sequences(data: Path, split: str, tokenizer: Tokenizer, *, context: int, n: int) -> list[tuple[TextDocument, list[int]]]:
    """Return n documents of a split with their first `context` tokens. Raises CorpusError if there are fewer.

    Python files and other documents alternate, until one of both has no more.
    """
    found: dict[bool, list[tuple[TextDocument, list[int]]]] = {True: [], False: []}
    for document in read_texts(data, split):
        kind = found[document.file.endswith(".py")]
        if len(kind) == n or document.size_bytes < BYTES * context:
            continue
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(ids) >= context:
            kind.append((document, ids[:context]))
    mixed = list(_alternating(found[True], found[False]))
    if len(mixed) < n:
        raise CorpusError(f"{data} has {len(mixed)} {split} documents of {context} tokens, and {n} are needed; collect more, or take fewer")
    return mixed[:n]


def _alternating(
    first: list[tuple[TextDocument, list[int]]], second: list[tuple[TextDocument, list[int]]]
) -> Iterator[tuple[TextDocument, list[int]]]:
    for at in range(max(len(first), len(second))):
        for kind in (first, second):
            yield from kind[at : at + 1]
