"""Cuts the training batches from the concatenation of all documents, each of which is followed by <|endoftext|>.

The concatenation is cut into sequences of N tokens, each used once per epoch. The order of the sequences and the place of the first cut
are drawn from (seed, epoch). So a batch depends only on (seed, step), and a resumed run gets the batches of an uninterrupted run. Every
sequence begins with an empty state. An <|endoftext|> inside a sequence marks the end of a document. Pictures have equal lengths. With
them, a sequence is <|endoftext|> and one picture, so that a position in the sequence is a position in the picture.
"""

import numpy as np
import torch
from torch import Tensor


class Packing:
    """Batches of (tokens, targets), where a target is the next token. Raises ValueError if the text is too short for one batch.

    `document` is the number of tokens of every document, if all documents have the same number, which must be `context`. None: documents
    differ in length.
    """

    def __init__(self, tokens: np.ndarray, *, context: int, batch: int, seed: int, document: int | None = None) -> None:
        if document not in (None, context):
            raise ValueError(f"context={context} must be {document} tokens, which each of these documents has")
        self.tokens, self.context, self.batch, self.seed = tokens, context, batch, seed
        self.whole_documents = document is not None
        self.steps_per_epoch = (len(tokens) - context) // context // batch  # one sequence fewer, as the first offset is random
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{len(tokens)} tokens do not fill a batch of {batch} x {context}; collect more text, or lower batch or context"
            )
        self._epoch = -1
        self._starts = np.empty(0, np.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and the targets of `step` (counted from 0), both (B, N) int64."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffled(epoch)
        starts = self._starts[at * self.batch : (at + 1) * self.batch]
        stretches = self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)  # (B, N + 1)
        return torch.from_numpy(stretches[:, :-1]), torch.from_numpy(stretches[:, 1:])

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return the start offsets of an epoch's sequences, in their shuffled order."""
        random = np.random.default_rng((self.seed, epoch))
        first = self.context - 1 if self.whole_documents else random.integers(self.context)
        last = len(self.tokens) - self.context - 1  # the index of the last possible first token, for which all targets exist
        return random.permutation(np.arange(first, last + 1, self.context, dtype=np.int64))
