"""Compares the graph of a decoder with a window with the original decoder, which attends to all tokens: up to the window they are equal."""

import numpy as np
import torch

from export.checks.decoder_parity import Steps
from export.checks.parity import largest_error
from models.decoder.model import Decoder

PIECE = 256  # tokens in a call
EVERY = 32  # logits are compared after every so many tokens


def compare_within(graph: Steps, full: Decoder, window: int, vocab_size: int, bar: float) -> float:
    """Return the largest |graph - full| of logits of a text of `window` tokens. Raises ExportError above `bar` times `parity.scale`."""
    tokens = np.random.default_rng(2).integers(0, vocab_size, (1, window))
    wanted = np.arange(EVERY - 1, window, EVERY)
    with torch.inference_mode():
        expected = full(torch.from_numpy(tokens), wanted=torch.from_numpy(wanted[None]))[0].float().numpy()[0]
    states, logits = graph.begin(1), []
    for begin in range(0, window, PIECE):
        here = tokens[:, begin : begin + PIECE]
        places = wanted[(wanted >= begin) & (wanted < begin + PIECE)] - begin
        found, states = graph.run(here, np.array([here.shape[1]]), np.array([begin]), states, places[None])
        logits.append(found[0])
    return largest_error(np.concatenate(logits), expected, bar, f"logits of {window} tokens: compared with full attention, the graph is")
