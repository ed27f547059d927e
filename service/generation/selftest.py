"""What a decoder's bundle must show before it is served: the logits it gave at export, for prompts and for what follows them."""

from pathlib import Path

import numpy as np

from export import contract
from service.generation.session import Logits, State, StepSession, zeros


def check_golden(bundle: Path, session: StepSession) -> None:
    """Feed the golden prompts, then their continuations token by token. BundleError when a logit is further off than the bundle allows."""
    golden = contract.read_decoder_golden(bundle)
    rows = zip(golden.token_ids, golden.continuations, golden.top_token_ids, golden.top_logits, strict=True)
    for prompt, continuation, top_ids, top_logits in rows:
        states = zeros(session.decoder, 1)
        logits, states = _fed(session, prompt, 0, states)
        error = float(np.abs(logits[list(top_ids)] - np.array(top_logits, np.float32)).max())
        for at, token_id in enumerate(continuation):
            error = max(error, float(logits.max() - logits[token_id]))
            logits, states = _fed(session, (token_id,), len(prompt) + at, states)
        if not error <= golden.max_abs_error:
            raise contract.BundleError(f"{bundle}: self-test failed, a logit is off by {error:.3g}, allowed {golden.max_abs_error:.3g}")


def _fed(session: StepSession, tokens: tuple[int, ...], position: int, states: list[State]) -> tuple[Logits, list[State]]:
    """The logits (V,) after these tokens, and the states."""
    length = np.array([len(tokens)], np.int64)
    out = [np.empty_like(state) for state in states]
    logits = session.run(np.array([tokens], np.int64), length, np.array([position], np.int64), length[None] - 1, states, out)
    return logits[0, 0].copy(), out
