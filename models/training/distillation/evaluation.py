"""Measures how similar a student's embeddings of held-out texts are to its teacher's.

Two figures are computed. One is the cosine between the student's and the teacher's embedding of a text. The other is Spearman's rank
correlation between the student's and the teacher's similarities of all pairs in a set of texts. It shows whether both agree on which
texts are near each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.training.distillation.batches import cut_into_batches, padded
from models.training.distillation.objectives import Embedder

TOKENS = 8_192  # largest number of tokens in a batch
BEYOND = (1_024, 2_048, 4_096, 8_192)  # lengths in tokens, beyond the teacher's limit, that are evaluated
BEYOND_TEXTS = 6  # maximum number of texts for each length in BEYOND


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The similarity of student and teacher on a set of texts."""

    texts: int
    cosine: float  # mean cosine over the texts
    lowest: float  # lowest cosine of a text
    ranks: float  # Spearman's rank correlation of the similarities of all pairs of texts; NaN for fewer than three texts


@torch.no_grad()
def embed(embedder: Embedder, rows: Sequence[Sequence[int]], *, show: Callable[[float], None] = lambda share: None) -> Tensor:
    """Return the embeddings (N, D) of N rows of token ids, in the order of the rows. `show` is called with the share of the work that is
    done (0 to 1)."""
    vectors: Tensor | None = None
    batches = cut_into_batches(rows, tokens=TOKENS)
    for number, batch in enumerate(batches):
        e, _ = embedder.vectors(padded([rows[i] for i in batch]))
        vectors = e.new_empty(len(rows), e.shape[1]) if vectors is None else vectors
        vectors[batch] = e
        show((number + 1) / len(batches))
    assert vectors is not None, "no text"
    return vectors


def likeness(ours: Tensor, teachers: Tensor) -> Likeness:
    """Compare the student's and the teacher's embeddings of the same texts, both (N, D) with rows of norm 1."""
    cosines = (ours * teachers).sum(-1)
    above = torch.triu_indices(len(ours), len(ours), offset=1)
    pairs = [(e @ e.mT)[above[0], above[1]] for e in (ours, teachers)]
    return Likeness(
        texts=len(ours), cosine=float(cosines.mean()), lowest=float(cosines.min()), ranks=spearman(*(x.double().numpy() for x in pairs))
    )


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation of x and y. Equal values, which are rare here, get different ranks in the order of their index."""
    if len(x) < 2:
        return float("nan")
    ranks_x, ranks_y = (values.argsort(kind="stable").argsort(kind="stable") for values in (x, y))
    return float(np.corrcoef(ranks_x, ranks_y)[0, 1])


def by_kind(ours: Tensor, teachers: Tensor, kinds: Sequence[str]) -> dict[str, Likeness]:
    """Return the likeness of each kind of text, and under the key "all" that of all texts. `kinds` has the kind of each row."""
    groups = {kind: [i for i, found in enumerate(kinds) if found == kind] for kind in dict.fromkeys(kinds)}
    return {kind: likeness(ours[rows], teachers[rows]) for kind, rows in groups.items()} | {"all": likeness(ours, teachers)}


def beyond(teacher: Embedder, student: Embedder, long_texts: Callable[[int], Sequence[Sequence[int]]]) -> dict[str, Likeness]:
    """Return the likeness on texts of N tokens to the teacher with repeated positions, for each N in BEYOND that the student supports. The
    keys are N as a string. `long_texts(N)` returns token ids of texts cut to N tokens.
    """
    lengths = [N for N in BEYOND if student.encoder.config.n_positions >= N]
    texts = {N: texts_of(N, long_texts(N))[:BEYOND_TEXTS] for N in lengths}
    return {str(N): likeness(embed(student, rows), embed(teacher, rows)) for N, rows in texts.items() if rows}


def texts_of(N: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Join rows into texts of exactly N tokens, each with one first and one last special token. No row is used twice."""
    made, inner = [], list[int]()
    for row in rows:
        inner += row[1:-1]
        if len(inner) >= N - 2:
            made.append([row[0], *inner[: N - 2], row[-1]])
            inner = []
    return made
