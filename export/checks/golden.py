"""Golden examples: texts or prompts with the outputs of the float32 torch model, which a server compares with its own at start."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export import contract
from export.checks.decoder_parity import Steps
from export.checks.golden_texts import PAIRS, PROMPTS
from export.checks.parity import Feed, Reference, Tensors, feed_of
from export.errors import ExportError
from models.folders.folder import read_tokenizer

N_CONTINUED = 16  # number of tokens that are generated after each prompt
N_TOP = 8  # how many of the largest logits are stored for each prompt


class GoldenTokenizer:
    """The tokenizer of a checkpoint as a server uses it: it truncates to `max_tokens`, adds special tokens if the model wants them, does
    not pad.
    """

    def __init__(self, file: Path, max_tokens: int, *, special_tokens: bool = True) -> None:
        self.tokenizer = read_tokenizer(file)
        self.special_tokens = special_tokens
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)

    def feed(self, inputs: Tensors, text: str, pair: str | None = None) -> Feed | None:
        """Return the text, or the pair of texts, as a batch of one. None if it has no tokens."""
        encoding = self.tokenizer.encode(text, pair, add_special_tokens=self.special_tokens)
        if not encoding.ids:
            return None
        ids, types = (np.array([numbers], np.int64) for numbers in (encoding.ids, encoding.type_ids))
        return feed_of(inputs, ids, np.ones_like(ids), types)


Rows = list[dict[str, NDArray[np.float32]]]  # for each text, its outputs by name
VECTORS = (contract.EMBEDDING, contract.SPARSE, contract.TOKEN_WEIGHTS, contract.MULTIVECTOR)  # outputs of encoders that are compared
N_MATRICES = 2  # texts whose token matrices are golden


class EncoderExamples:
    """Texts with tokens, their inputs (each a batch of one), and torch's outputs of each text. `pairs`: the second texts."""

    def __init__(
        self, kind: contract.Kind, tokens: GoldenTokenizer, graph: tuple[Tensors, Tensors], reference: Reference, texts: Sequence[str]
    ) -> None:
        """`graph` has its inputs and outputs."""
        self.traits = contract.KINDS[kind]
        inputs, outputs = graph
        named = [tensor.name for tensor in outputs]
        self.compared = [self.traits.output] if self.traits.has_labels else [name for name in VECTORS if name in named]
        partners = [None if 1 in self.traits.texts else PAIRS[i % len(PAIRS)] for i in range(len(texts))]
        found = [(text, pair, tokens.feed(inputs, text, pair)) for text, pair in zip(texts, partners, strict=True)]
        kept = [(text, pair, feed) for text, pair, feed in found if feed is not None]
        self.texts = tuple(text for text, _, _ in kept)
        self.pairs = tuple(pair for _, pair, _ in kept if pair is not None) or None
        self.feeds = [feed for _, _, feed in kept]
        self.rows = self.run(reference)

    def run(self, answer: Reference) -> Rows:
        made = [answer(feed) for feed in self.feeds]
        first = (0, 0) if self.traits.per_token else (0,)
        return [{name: arrays[name][first] for name in self.compared if name in arrays} for arrays in made]

    def logits(self, rows: Rows) -> NDArray[np.float32]:
        """Return the logits of all texts, (n, L)."""
        return np.stack([row[contract.LOGITS] for row in rows])

    def cosines(self, rows: Rows) -> NDArray[np.float64]:
        """Return for each text the lowest cosine between an output, or a token's vector, of `rows` and torch's. For logits they are
        computed as `contract.Parity.min_cosine` defines.
        """
        if self.traits.has_labels:
            return _logit_cosines(self.logits(rows), self.logits(self.rows))
        return np.array(
            [
                min(float(cosines(np.atleast_2d(row[name]), np.atleast_2d(want[name])).min()) for name in row)
                for row, want in zip(rows, self.rows, strict=True)
            ]
        )

    def rank_correlation(self, rows: Rows) -> float:
        """Return `contract.RecipeTrial.rank_correlation` of `rows` with torch's rows: of the first output, or the mean of its tokens."""
        if self.traits.has_labels:
            return min(spearman(got, want) for got, want in zip(self.logits(rows).T, self.logits(self.rows).T, strict=True))
        got, want = (
            np.stack([row[name].mean(axis=0) if (name := self.compared[0]) == contract.MULTIVECTOR else row[name] for row in each])
            for each in (rows, self.rows)
        )
        return spearman(_similarities(got), _similarities(want))

    def golden(self, rows: Rows, sparse: contract.Sparse | None, **bound: float) -> contract.Golden:
        """Return the texts with these outputs."""
        output, has = self.traits.output, self.compared
        return contract.Golden(
            texts=self.texts,
            pairs=self.pairs,
            outputs=tuple(tuple(map(float, row[output])) for row in rows) if output in has else (),
            sparse=None if sparse is None else tuple(self._sparse(row, feed, sparse) for row, feed in zip(rows, self.feeds, strict=True)),
            matrices=tuple(tuple(tuple(map(float, each)) for each in row[contract.MULTIVECTOR]) for row in rows[:N_MATRICES])
            if contract.MULTIVECTOR in has
            else None,
            **bound,
        )

    def _sparse(self, row: dict[str, NDArray[np.float32]], feed: Feed, sparse: contract.Sparse) -> contract.GoldenSparse:
        weights = row.get(contract.SPARSE)
        if weights is None:
            weights = np.zeros(sparse.size, np.float32)
            np.maximum.at(weights, feed[contract.INPUT_IDS][0], row[contract.TOKEN_WEIGHTS])
            weights[list(sparse.ignored_ids)] = 0
        indices = np.flatnonzero(weights)
        largest = np.sort(indices[np.argsort(-weights[indices], kind="stable")[: contract.MOST_GOLDEN_WEIGHTS]])
        return contract.GoldenSparse(
            indices=tuple(map(int, largest)), weights=tuple(map(float, weights[largest])), cut=len(largest) < len(indices)
        )


def cosines(got: NDArray[np.float32], want: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosine of each pair of rows: (n, D), (n, D) -> (n,). It is 1 for two rows of zeros, and 0 if only one of them is zero."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("nd,nd->n", a, b)
    same = ~a.any(axis=1) & ~b.any(axis=1)
    return np.where(same, 1.0, dots / np.where(lengths == 0, 1.0, lengths))


def spearman(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation of two arrays (n,), or 0 if all numbers of one are equal."""
    a, b = (ranks - ranks.mean() for ranks in map(_ranks, (got, want)))
    lengths = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / lengths if lengths else 0.0


def _ranks(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the rank of each number (n,). Equal numbers have the mean of their ranks."""
    _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _similarities(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the cosines of all pairs of different rows: (n, D) -> (n (n - 1) / 2,)."""
    first, second = np.triu_indices(len(rows), 1)
    return cosines(rows[first], rows[second])


def _logit_cosines(got: NDArray[np.float32], want: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return a cosine per label, between its logits for all n texts, minus their mean in `want`: (n, L), (n, L) -> (L,)."""
    mean = want.mean(axis=0)
    return cosines((got - mean).T, (want - mean).T)


class DecoderExamples:
    """Prompts with the reference model's logits (n, V) after each prompt and its greedy continuation. Raises ExportError without room for
    any.
    """

    def __init__(self, tokenizer: Tokenizer, reference: Steps) -> None:
        longest = reference.n_positions
        cut = [(prompt, tokenizer.encode(prompt).ids) for prompt in PROMPTS]
        fitting = [(prompt, ids) for prompt, ids in cut if ids and (longest is None or len(ids) + N_CONTINUED <= longest)]
        if not fitting:
            raise ExportError(f"n_positions={longest} is too small for a prompt and the {N_CONTINUED} tokens after it; use a longer model")
        self.prompts = tuple(prompt for prompt, _ in fitting)
        self.token_ids = [ids for _, ids in fitting]
        runs = [greedy(reference, ids, N_CONTINUED) for ids in self.token_ids]
        self.logits = np.stack([logits for logits, _ in runs])
        self.continuations = [tokens for _, tokens in runs]

    def run(self, steps: Steps) -> NDArray[np.float32]:
        return np.stack([greedy(steps, ids, 1)[0] for ids in self.token_ids])

    def golden(self, max_abs_error: float) -> contract.DecoderGolden:
        top = np.argsort(-self.logits, axis=1, kind="stable")[:, :N_TOP]  # (n, N_TOP)
        return contract.DecoderGolden(
            prompts=self.prompts,
            token_ids=tuple(map(tuple, self.token_ids)),
            continuations=tuple(map(tuple, self.continuations)),
            top_token_ids=tuple(tuple(map(int, row)) for row in top),
            top_logits=tuple(tuple(map(float, row)) for row in np.take_along_axis(self.logits, top, axis=1)),
            max_abs_error=max_abs_error,
        )


def greedy(steps: Steps, prompt: Sequence[int], n: int) -> tuple[NDArray[np.float32], list[int]]:
    """Return the logits (V,) after the prompt, and n tokens generated greedily."""
    states, position, fed = steps.begin(1), 0, np.array([prompt])
    rows: list[NDArray[np.float32]] = []
    while len(rows) < n:
        last = np.array([[fed.shape[1] - 1]])
        logits, states = steps.run(fed, np.array([fed.shape[1]]), np.array([position]), states, last)
        rows.append(logits[0, 0])
        position += fed.shape[1]
        fed = np.array([[rows[-1].argmax()]])
    return rows[0], [int(row.argmax()) for row in rows]
