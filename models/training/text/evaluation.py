"""Computes bits per byte of held-out text: the cross-entropy of its tokens in bits, divided by the bytes of the text. So models with
different tokenizers can be compared.

Each document starts after <|endoftext|> with an empty state. Each of its tokens counts, including the <|endoftext|> at its end. With
`context=None` the whole document is read in chunks that pass on the state. Otherwise it is cut into windows of `context` tokens. Each
window begins with an empty state, and its first input is the token before the window, as in training sequences. A model with learned
positions is always evaluated in windows, of at most n_positions tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.decoder.model import Decoder
from models.training.corpus import TokenDocument

CHUNK = 256  # number of tokens in one call of the model
ROWS = 16  # largest number of documents or windows in a batch
ROW_TOKENS = 65_536  # largest number of tokens in a batch, because a softmax layer keeps the keys and values of all of them


@dataclass(frozen=True, kw_only=True)
class BitsPerByte:
    overall: float
    packages: dict[str, float]  # name -> bits per byte
    n_tokens: int
    size_bytes: int


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    documents: Sequence[TokenDocument],
    *,
    end_of_text: int,
    context: int | None = None,
    show: Callable[[float], None] = lambda share: None,
) -> BitsPerByte:
    """Return the bits per byte of all documents. `show` is called with the share of the tokens that have been evaluated, 0 to 1."""
    device = next(model.parameters()).device
    longest = model.config.n_positions if isinstance(model, Decoder) else None
    context = min((limit for limit in (context, longest) if limit is not None), default=None)
    stretches = [stretch for i, document in enumerate(documents) for stretch in _stretches(i, document, end_of_text, context)]
    stretches.sort(key=lambda stretch: -len(stretch[1]))  # longest first, so that memory runs out at the beginning if it is too small
    bits, done, total = np.zeros(len(documents)), 0, sum(len(document.tokens) for document in documents)
    training = model.training
    model.eval()
    while stretches:
        rows = max(1, min(ROWS, ROW_TOKENS // len(stretches[0][1])))
        group, stretches = stretches[:rows], stretches[rows:]
        for (i, tokens), found in zip(group, _bits(model, [tokens for _, tokens in group], device), strict=True):
            bits[i] += found
            done += len(tokens) - 1
        show(done / total)
    model.train(training)
    return _summed(documents, bits)


def first(documents: Sequence[TokenDocument], size_bytes: int) -> list[TokenDocument]:
    """Return the documents in order, but skip each one that would make the total size exceed `size_bytes`. The first document is always
    returned."""
    taken, total = list[TokenDocument](), 0
    for document in documents:
        if not taken or total + document.size_bytes <= size_bytes:
            taken.append(document)
            total += document.size_bytes
    return taken


def _stretches(i: int, document: TokenDocument, end_of_text: int, context: int | None) -> list[tuple[int, np.ndarray]]:
    """Cut a document into windows of `context` tokens. If `context` is None, the whole document is one window. Return for each window the
    pair of `i`, the document's number, and the window's n tokens with the token before them, (n + 1,). The model reads a window from an
    empty state and predicts its n tokens.
    """
    tokens = np.concatenate([[end_of_text], document.tokens]).astype(np.int64)
    length = len(document.tokens) if context is None else context
    return [(i, tokens[start : start + length + 1]) for start in range(0, len(document.tokens), length)]


def _bits(model: nn.Module, rows: list[np.ndarray], device: torch.device) -> np.ndarray:
    """Return for each row the bits of its tokens after the first, float64 (len(rows),). Row i has n_i + 1 tokens. The longest rows come
    first.
    """
    lengths = torch.tensor([len(row) - 1 for row in rows])
    padded = torch.zeros(len(rows), int(lengths[0]) + 1, dtype=torch.int64)
    for row, place in zip(rows, padded, strict=True):
        place[: len(row)] = torch.from_numpy(row)
    states, total = None, np.zeros(len(rows))
    for start in range(0, int(lengths[0]), CHUNK):
        n_left = int((lengths > start).sum())  # unfinished rows; finished rows are at the end and are dropped
        states = states and [{name: tensor[:n_left] for name, tensor in state.items()} for state in states]
        chunk = padded[:n_left, start : start + CHUNK + 1].to(device)
        tokens, targets = chunk[:, :-1], chunk[:, 1:]
        here = (lengths[:n_left] - start).clamp(max=tokens.shape[1]).to(device)  # (B,) length of each row in this chunk
        logits, states = model(tokens, here, states, torch.full_like(here, start))
        total[:n_left] += _token_bits(logits, targets, here).cpu().numpy()
    return total


def _token_bits(logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """Sum the bits of each row without its padding: logits (B, N, V), targets (B, N), lengths (B,) -> (B,) float64."""
    nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    seen = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
    return (nats * seen).double().sum(dim=1) / math.log(2)


def _summed(documents: Sequence[TokenDocument], bits: np.ndarray) -> BitsPerByte:
    names = sorted({document.package for document in documents})
    of = {name: [i for i, document in enumerate(documents) if document.package == name] for name in names}
    sizes = np.array([document.size_bytes for document in documents])
    return BitsPerByte(
        overall=float(bits.sum() / sizes.sum()),
        packages={name: float(bits[of[name]].sum() / sizes[of[name]].sum()) for name in names},
        n_tokens=sum(len(document.tokens) for document in documents),
        size_bytes=int(sizes.sum()),
    )
