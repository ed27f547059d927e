"""Tests a decoder's bundle before it is served: the logits for golden prompts and continuations must be those of the export."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export import contract
from service.generation.session import Logits, StepSession
from service.generation.slots import Slots


def check_golden(bundle: Path, session: StepSession[Any], encode: Callable[[str], Sequence[int]] | None = None) -> str:
    """Feed the golden prompts, then their continuations token by token. Raises BundleError if a logit differs by more than the bundle
    allows, or if the tokenizer's `encode` gives other tokens for a prompt.

    Returns the sha256 of all computed logits (float32), so that two results are equal only if all logits have the same bits.
    """
    golden = contract.read_golden(bundle, contract.DecoderGolden)
    for ids in (*golden.token_ids, *golden.continuations, *golden.top_token_ids):
        if max(ids, default=0) >= session.vocab_size:
            raise contract.BundleError(f"{bundle / contract.GOLDEN} has a token {max(ids)}, and the model {session.vocab_size}")
    for text, ids in zip(golden.prompts, golden.token_ids, strict=True):
        if encode is not None and tuple(encode(text)) != ids:
            raise contract.BundleError(f"{bundle}: self-test failed, the tokenizer makes other tokens of {text!r:.80} than at export")
    checksum = hashlib.sha256()
    rows = zip(golden.token_ids, golden.continuations, golden.top_token_ids, golden.top_logits, strict=True)
    for prompt, continuation, top_ids, top_logits in rows:
        slots: Slots[str] = Slots(session, 1)
        slots.add("golden")
        logits = _fed(session, prompt, slots)
        checksum.update(logits.tobytes())
        error = float(np.abs(logits[list(top_ids)] - np.array(top_logits, np.float32)).max())
        for token_id in continuation:
            error = max(error, float(logits.max() - logits[token_id]))
            logits = _fed(session, (token_id,), slots)
            checksum.update(logits.tobytes())
        if not error <= golden.max_abs_error:
            raise contract.BundleError(f"{bundle}: self-test failed, a logit is off by {error:.3g}, allowed {golden.max_abs_error:.3g}")
    return checksum.hexdigest()


def _fed(session: StepSession[Any], tokens: tuple[int, ...], slots: Slots[str]) -> Logits:
    """Feed the tokens, and return the logits (V,) after the last one."""
    most = session.decoder.max_call_tokens or len(tokens)
    for begin in range(0, max(len(tokens) - most, 0), most):
        _fed(session, tokens[begin : begin + most], slots)
    tokens = tokens[-((len(tokens) - 1) % most + 1) :]
    length = np.array([len(tokens)], np.int64)
    slots.reserve(len(tokens))
    logits = session.run(np.array([tokens], np.int64), length, slots.positions, length[None] - 1, *slots.sets)
    slots.stepped(length)
    of_the_last: Logits = logits[0, 0]
    return of_the_last
