"""The fields of a state that are computed from its tokens, and its bytes."""

import numpy as np

from service.generation.saved.packing import Packing
from service.generation.state import State
from service.states.blob import MOST_RECENT, unpack
from service.states.record import new_state_id
from tests.service.generation.fake_steps import VOCAB_SIZE, FakeSteps

STEPS = FakeSteps()
PACKING = Packing(STEPS.decoder, vocab_size=VOCAB_SIZE, fingerprint="fake", numerics="ab")


def state(position: int) -> State:
    return State(tensors=tuple(STEPS.states(1).read(0, 0)), position=position, logits=np.zeros(VOCAB_SIZE, np.float32), fingerprint="fake")


def test_the_newest_tokens_of_a_state_are_those_of_its_whole_text() -> None:
    text = tuple(range(100))
    for begun in (1, 20, 50, 90):
        origin = PACKING.whole(state(begun), None, text[:begun])
        whole, plain = PACKING.whole(state(100), origin, text[begun:]), PACKING.whole(state(100), None, text)
        assert whole.recent == plain.recent == text[-MOST_RECENT:]
        assert np.array_equal(whole.seen, plain.seen)


def test_the_bytes_of_a_state_name_its_parent() -> None:
    own, above = new_state_id(), new_state_id()
    for parent in (above, None):
        packed = PACKING.pack(PACKING.whole(state(1), None, (5,)), id=own, model="m", parent=parent, created=1.5)
        blob = unpack(packed, STEPS.decoder, VOCAB_SIZE, "fake")
        assert (blob.parent, blob.id, blob.created) == (parent, own, 1.5)
