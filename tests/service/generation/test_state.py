"""A state that is damaged or of another model is refused, with the reason."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from export import contract
from service.errors import InvalidRequest
from service.generation.state import State

VOCAB_SIZE = 5
DECODER = contract.Decoder(
    states=(contract.StateTensor(name="state_0_S", shape=(2, 3)), contract.StateTensor(name="state_0_z", shape=(2,))),
    takes_positions=False,
    exact=True,
)
S, Z, LOGITS = np.ones((2, 3), np.float32), np.ones(2, np.float32), np.zeros(VOCAB_SIZE, np.float32)
GOOD = State(tensors=(S, Z), position=4, logits=LOGITS, fingerprint="ours")


def changed(**fields: Any) -> State:
    return dataclasses.replace(GOOD, **fields)


def test_a_good_state_is_accepted() -> None:
    GOOD.check(DECODER, VOCAB_SIZE, "ours")
    changed(tensors=(0 * S, 0 * Z), position=0, logits=None).check(DECODER, VOCAB_SIZE, "ours")
    changed(logits=np.array([0, -np.inf, 0, 0, 0], np.float32)).check(DECODER, VOCAB_SIZE, "ours")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (changed(fingerprint="theirs"), "of the bundle with fingerprint 'theirs' and this model's is 'ours'"),
        (changed(position=-1), "its position is -1, and the least is 0"),
        (changed(tensors=(S,)), "it has 1 tensors, not 2"),
        (changed(tensors=(S.T, Z)), r"state_0_S has the shape \(3, 2\), not \(2, 3\)"),
        (changed(tensors=(S, Z.astype(np.float64))), "state_0_z has the dtype float64, not float32"),
        (changed(tensors=(np.full_like(S, np.nan), Z)), "state_0_S has numbers that are not finite"),
        (changed(tensors=(S, np.full_like(Z, np.inf))), "state_0_z has numbers that are not finite"),
        (changed(tensors=(S, 0 * Z)), "state_0_z has numbers that are not above 0"),
        (changed(tensors=(S, -Z)), "state_0_z has numbers that are not above 0"),
        (changed(logits=LOGITS[:-1]), "logits has not 5 numbers in float32"),
        (changed(logits=LOGITS.astype(np.float64)), "logits has not 5 numbers in float32"),
        (changed(logits=LOGITS + np.float32(np.nan)), "logits has numbers that are not finite"),
    ],
)
def test_a_bad_state_is_refused_with_the_reason(state: State, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        state.check(DECODER, VOCAB_SIZE, "ours")


@pytest.mark.parametrize(
    ("holds", "good", "bad"),
    [
        ("sums", [[1e-9, 1]], [[0, 1]]),
        ("sums_in_last_column", [[-1, 0], [0, 2]], [[1, 0], [1, 0]]),
        ("sums_in_last_column", [[-1, 1e-9]], [[1, -1e-9], [1, 2]]),
        ("count", [[1, 4]], [[1, 5]]),
        ("count", [[4]], [[0]]),
        ("count", [[4]], [[1.5]]),
        (None, [[-1, 0]], None),
    ],
)
def test_numbers_are_what_the_manifest_promises_of_them(holds: contract.Holds | None, good: Any, bad: Any) -> None:
    for numbers, words in ((good, None), (bad, "state_0_S")):
        if numbers is None:
            continue
        S = np.array([numbers], np.float32)  # (H, D, ..), one head
        spec = contract.StateTensor(name="state_0_S", shape=S.shape, holds=holds)
        decoder = DECODER.model_copy(update={"states": (spec, DECODER.states[1])})
        changed(tensors=(0 * S, 0 * Z), position=0).check(decoder, VOCAB_SIZE, "ours")
        if words is None:
            changed(tensors=(S, Z)).check(decoder, VOCAB_SIZE, "ours")
        else:
            with pytest.raises(InvalidRequest, match=words):
                changed(tensors=(S, Z)).check(decoder, VOCAB_SIZE, "ours")


def test_a_position_beyond_those_of_the_model_is_refused() -> None:
    GOOD.check(DECODER.model_copy(update={"n_positions": 4}), VOCAB_SIZE, "ours")
    with pytest.raises(InvalidRequest, match="its position is 4, and the most is 3"):
        GOOD.check(DECODER.model_copy(update={"n_positions": 3}), VOCAB_SIZE, "ours")
