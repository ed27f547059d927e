"""The likeness of a student to its teacher on held-out texts.

Two figures: the cosine of the two embeddings of a text, and, of a set of texts, Spearman's rank correlation of the similarities of all
pairs, which shows whether student and teacher agree on the texts that are near each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.distillation.batches import cut_into_batches, padded
from models.distillation.objectives import Embedder

LENGTHS = (32, 64, 128, 256, 512)  # tokens at most: the rows of the table by length
TOKENS = 8_192  # of a batch
BEYOND = (1_024, 2_048, 4_096, 8_192)  # tokens: lengths beyond the teacher's limit
BEYOND_TEXTS = 6  # of each of these lengths


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
    ranks_x, ranks_y = (values.argsort(kind="stable").argsort(kind="stable") for values in (x, y))
    return float(np.corrcoef(ranks_x, ranks_y)[0, 1])


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


def beyond(
    teacher: Embedder, student: Embedder, long_texts: Callable[[int], Sequence[Sequence[int]]], *, limit: int
) -> dict[str, dict[str, Any]]:
    """Likeness on texts of N tokens, for each N of BEYOND that the student reads, N as a string.

    The student is compared with the teacher (whose positions repeat) and with the mean of the teacher's embeddings of pieces of `limit`
    tokens; these two are compared as well. `long_texts` gives token ids of texts cut at N.
    """
    found = {}
    for N in BEYOND:
        if student.encoder.config.n_positions < N or not (rows := texts_of(N, long_texts(N))[:BEYOND_TEXTS]):
            continue
        ours, teachers = embed(student, rows), embed(teacher, rows)
        pieces = torch.stack([_mean_of_pieces(teacher, row, limit) for row in rows])
        found[str(N)] = {
            "teacher": asdict(likeness(ours, teachers)),
            "pieces": asdict(likeness(ours, pieces)),
            "teacher_to_pieces": asdict(likeness(teachers, pieces)),
        }
    return found


def texts_of(N: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Texts of N tokens each, joined from shorter ones; no text is used twice. All have a first and a last special token."""
    made, inner = [], list[int]()
    for row in rows:
        inner += row[1:-1]
        if len(inner) >= N - 2:
            made.append([row[0], *inner[: N - 2], row[-1]])
            inner = []
    return made


def _mean_of_pieces(teacher: Embedder, row: Sequence[int], limit: int) -> Tensor:
    """The normalised mean embedding of pieces of at most `limit` tokens, each with the first and last special token of the text."""
    first, last, inner = row[0], row[-1], row[1:-1]
    starts = range(0, len(inner), limit - 2)
    pieces = [[first, *inner[start : start + limit - 2], last] for start in starts]
    return torch.nn.functional.normalize(embed(teacher, pieces).mean(0), dim=0)
