"""The tokens of a training step. All documents are concatenated, each ended by <|endoftext|>; a sequence is a stretch of the result.

The result is cut into stretches of N tokens, and each is used once an epoch. The order of the stretches and the offset of the first cut are
drawn from (seed, epoch), so the batch of a step is a function of (seed, step) and a resumed run gets the batches of a straight one. Every
sequence begins with an empty state; <|endoftext|> inside it marks a new document. Pictures are equally long: there a stretch is one
picture and the <|endoftext|> before it, so that a position in the sequence is a position in the picture.
"""

import numpy as np
import torch
from torch import Tensor


class Packing:
    """Batches of (tokens, targets), the targets one token further. Raises ValueError where the text does not fill one batch.

    `document`: tokens of each document if all have the same number, which must be the context.
    """

    def __init__(self, tokens: np.ndarray, *, context: int, batch: int, seed: int, document: int | None = None) -> None:
        if document not in (None, context):
            raise ValueError(f"context={context} must be {document} tokens, which each of these documents has")
        self.tokens, self.context, self.batch, self.seed = tokens, context, batch, seed
        self.whole_documents = document is not None
        self.steps_per_epoch = (len(tokens) - context) // context // batch  # one stretch less, since the cutting begins anywhere
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{len(tokens)} tokens do not fill a batch of {batch} x {context}; collect more text, or lower batch or context"
            )
        self._epoch = -1
        self._starts = np.empty(0, np.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """(B, N) int64 and (B, N) int64 of step 0, 1, 2, ..."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffled(epoch)
        starts = self._starts[at * self.batch : (at + 1) * self.batch]
        stretches = self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)  # (B, N + 1)
        return torch.from_numpy(stretches[:, :-1]), torch.from_numpy(stretches[:, 1:])

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Where the sequences of an epoch begin, in its order."""
        random = np.random.default_rng((self.seed, epoch))
        first = self.context - 1 if self.whole_documents else random.integers(self.context)
        last = len(self.tokens) - self.context - 1  # the last target must exist
        return random.permutation(np.arange(first, last + 1, self.context, dtype=np.int64))
