"""How like its teacher a student is, on texts that neither it nor its maps were trained on.

Of every text the cosine of its two embeddings; of a set of texts, the rank correlation (Spearman's) of the similarities of all its pairs:
whether the student finds the same texts near each other as the teacher does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.distillation.batches import cut_into_batches, padded
from models.distillation.objectives import Embedder

LENGTHS = (32, 64, 128, 256, 512)  # tokens at most: the rows of the table by length
TOKENS = 8_192  # of a batch


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Of the texts of one kind, of one length, or of all."""

    texts: int
    cosine: float  # mean
    lowest: float
    ranks: float  # Spearman's correlation of pair similarities; NaN for fewer than three texts


@torch.no_grad()
def embed(embedder: Embedder, rows: Sequence[Sequence[int]], *, show: Callable[[float], None] = lambda share: None) -> Tensor:
    """Token ids of N texts -> (N, D), each text where it was. show: the share that is done."""
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
    """(N, D) twice, of length 1."""
    cosines = (ours * teachers).sum(-1)
    above = torch.triu_indices(len(ours), len(ours), offset=1)
    pairs = [(e @ e.mT)[above[0], above[1]] for e in (ours, teachers)]
    return Likeness(
        texts=len(ours), cosine=float(cosines.mean()), lowest=float(cosines.min()), ranks=spearman(*(x.double().numpy() for x in pairs))
    )


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of ranks; equal numbers, which are rare among similarities, are ranked as they come."""
    if len(x) < 2:
        return float("nan")
    ranks = [values.argsort(kind="stable").argsort(kind="stable") for values in (x, y)]
    return float(np.corrcoef(*ranks)[0, 1])


def by_kind(ours: Tensor, teachers: Tensor, kinds: Sequence[str]) -> dict[str, Likeness]:
    """Every kind, and "all"."""
    groups = {kind: [i for i, found in enumerate(kinds) if found == kind] for kind in dict.fromkeys(kinds)}
    return {kind: likeness(ours[rows], teachers[rows]) for kind, rows in groups.items()} | {"all": likeness(ours, teachers)}


def by_length(ours: Tensor, teachers: Tensor, lengths: Sequence[int]) -> dict[str, Likeness]:
    """In steps of LENGTHS, where there are texts."""
    found, least = {}, 0
    for most in LENGTHS:
        if rows := [i for i, length in enumerate(lengths) if least < length <= most]:
            found[f"{least + 1} to {most}"] = likeness(ours[rows], teachers[rows])
        least = most
    return found
