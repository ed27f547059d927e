"""Measures how near a decoder in a lower precision stays to the answers of its weights in fp32: the fp32 graph answers prompts greedily,
both graphs read these answers, and their logits before each token are compared.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from export import contract
from export.checks.bits_per_byte import LOGITS
from export.checks.decoder_parity import Steps, Values, feed

TOKENS = 64  # longest answer
FIRST = 16  # an answer that has so many of fp32's first tokens begins as fp32's does
CHUNK = 128  # tokens of a row in one call
ROWS = 16  # answers that are written at once

LEAST_SAME = 0.9  # least fraction of prompts whose answer begins as fp32's does
MOST_KL = 0.005  # largest mean Kullback-Leibler divergence, in nats a token
LOGIT_ERROR = 0.01  # largest error of a logit, relative to the largest logit

Show = Callable[[float], None]  # called with the fraction of the work that is done


class Fp32Answers:
    """Prompts, as token ids, with fp32's greedy answers: up to TOKENS tokens, and up to a token that ends a text."""

    def __init__(self, fp32: Steps, prompts: Sequence[Sequence[int]], end_token_ids: Collection[int], show: Show) -> None:
        self._fp32 = fp32
        self._rows: list[tuple[Sequence[int], list[int]]] = []  # prompts and answers
        for done in range(0, len(prompts), ROWS):
            show(done / len(prompts))
            group = prompts[done : done + ROWS]
            self._rows += zip(group, _written(fp32, group, end_token_ids), strict=True)

    def compare(self, graph: Steps, vocab_size: int, *, limited: bool, show: Show) -> contract.Answers:
        """Compare the logits of `graph` with those of fp32. With `limited`, the result has the limits of the figures."""
        same, divergence, error, largest, tokens = 0, 0.0, 0.0, 1.0, 0
        beside = max(1, LOGITS // (CHUNK * vocab_size))
        for done in range(0, len(self._rows), beside):
            show(done / len(self._rows))
            group = self._rows[done : done + beside]
            for (_, answer), got, want in zip(group, _read(graph, group), _read(self._fp32, group), strict=True):
                same += bool((got[:FIRST].argmax(axis=1) == answer[:FIRST]).all())
                divergence += float(_divergence(got, want).sum())
                error, largest = max(error, float(np.abs(got - want).max())), max(largest, float(np.abs(want).max()))
                tokens += len(answer)
        limits = contract.AnswerFigures(
            same=int(np.ceil(LEAST_SAME * len(self._rows))), mean_kl=MOST_KL, logit_error=round(LOGIT_ERROR * largest, 3)
        )
        return contract.Answers(
            prompts=len(self._rows),
            first_tokens=FIRST,
            tokens=tokens,
            measured=contract.AnswerFigures(same=same, mean_kl=divergence / tokens, logit_error=error),
            limits=limits if limited else None,
        )


def _written(steps: Steps, prompts: Sequence[Sequence[int]], end_token_ids: Collection[int]) -> list[list[int]]:
    """Return the greedy answer to each prompt, its end token included."""
    states = steps.begin(len(prompts), max(map(len, prompts)) + TOKENS)
    _, states = feed(steps, [prompt[:-1] for prompt in prompts], CHUNK, states, with_logits=False)
    tokens, positions = np.array([prompt[-1] for prompt in prompts]), np.array([len(prompt) - 1 for prompt in prompts])
    answers: list[list[int]] = [[] for _ in prompts]
    while True:
        goes_on = np.array([len(answer) < TOKENS and not (answer and answer[-1] in end_token_ids) for answer in answers])
        if steps.n_positions is not None:
            goes_on &= positions < steps.n_positions
        if not goes_on.any():
            return answers
        lengths = goes_on.astype(np.int64)
        logits, states = steps.run(tokens[:, None], lengths, positions, states)
        tokens, positions = logits[:, 0].argmax(axis=1), positions + lengths
        for row in np.flatnonzero(goes_on):
            answers[row].append(int(tokens[row]))


def _read(steps: Steps, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Values]:
    """Return the logits before each token of each answer, (T, V)."""
    texts = [[*prompt, *answer[:-1]] for prompt, answer in rows]
    logits, _ = feed(steps, texts, CHUNK, steps.begin(len(texts), max(map(len, texts))))
    return [found[len(prompt) - 1 :] for found, (prompt, _) in zip(logits, rows, strict=True)]


def _divergence(got: Values, want: Values) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of the distributions `got` from `want`, in nats: (T, V), (T, V) -> (T,)."""
    q, p = _log_softmax(got), _log_softmax(want)
    found: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
    return np.maximum(found, 0)


def _log_softmax(logits: Values) -> Values:
    below: Values = logits - logits.max(axis=1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=1, keepdims=True))
