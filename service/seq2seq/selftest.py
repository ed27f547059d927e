"""Tests an encoder-decoder's bundle before it is served: the logits of each step must be those of the export."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from export import contract
from service.seq2seq.session import WritingSession


def check_golden(bundle: Path, session: WritingSession, encode: Callable[[str], Sequence[int]]) -> None:
    """Encode the golden sources and decode their outputs. Raises BundleError if a logit differs by more than the bundle allows, or if
    the tokenizer's `encode` gives other tokens for a source."""
    golden = contract.read_golden(bundle, contract.EncoderDecoderGolden)
    for text, ids in zip(golden.texts, golden.token_ids, strict=True):
        if tuple(encode(text)) != ids:
            raise contract.BundleError(f"{bundle}: self-test failed, the tokenizer makes other tokens of {text!r:.80} than at export")
    used = [*golden.token_ids, *golden.outputs, *(ids for top in golden.top_token_ids for ids in top)]
    if (worst := max(map(max, used))) >= session.vocab_size:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has a token {worst}, and the model {session.vocab_size}")
    for ids, output, top, logits in zip(golden.token_ids, golden.outputs, golden.top_token_ids, golden.logits, strict=True):
        rows, previous = session.read([list(ids)]), session.both.begin_token_id
        for token, wanted_ids, wanted in zip(output, top, logits, strict=True):
            made = session.step(np.array([previous], np.int64), rows)
            rows.state, previous = made.state, token
            error = float(np.abs(made.logits[0, list(wanted_ids)] - np.array(wanted, np.float32)).max())
            if not error <= golden.max_abs_error:
                raise contract.BundleError(f"{bundle}: self-test failed, a logit is off by {error:.3g}, allowed {golden.max_abs_error:.3g}")
