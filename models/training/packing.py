"""Which tokens a step sees. All documents lie in one line, each ended by <|endoftext|>; a sequence is a stretch of that line.

The line is cut into stretches of N tokens, every stretch is seen once an epoch, and the order is drawn from (seed, epoch), as is where the
cutting begins. So the batch of a step is a function of (seed, step): a run that is taken up again sees what it would have seen.
A sequence begins with an empty state wherever it begins, and the model learns from <|endoftext|> that what came before has ended.
"""

import numpy as np
import torch
from torch import Tensor


class Packing:
    """Batches of (tokens, targets), the targets one token further. Raises ValueError where the text does not fill one batch."""

    def __init__(self, tokens: np.ndarray, *, context: int, batch: int, seed: int) -> None:
        self.tokens, self.context, self.batch, self.seed = tokens, context, batch, seed
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
        first = random.integers(self.context)
        last = len(self.tokens) - self.context - 1  # the last target must exist
        return random.permutation(np.arange(first, last + 1, self.context, dtype=np.int64))
