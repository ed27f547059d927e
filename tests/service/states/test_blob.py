"""A state survives packing to the bit, and equal states have equal bytes."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from export import contract
from service.states.blob import Blob, pack, unpack
from service.states.record import new_state_id

STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine too

VOCAB_SIZE = 13
OURS = "ours"
DECODER = contract.Decoder(
    states=(
        contract.StateTensor(name="state_0_S", shape=(2, 3)),
        contract.StateTensor(name="state_0_n", shape=(1,), dtype="int64"),
        contract.StateTensor(name="state_1_z", shape=(3,)),
    ),
    takes_positions=False,
    n_positions=100,
    exact=True,
)
NAMES = [spec.name for spec in DECODER.states]


def seen(*ids: int) -> Any:
    bits = np.zeros(VOCAB_SIZE, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little")


GOOD = Blob(
    tensors=(np.arange(6, dtype=np.float32).reshape(2, 3), np.array([4]), np.array([1, 2, 0.5], np.float32)),
    logits=np.linspace(-3, 2, VOCAB_SIZE, dtype=np.float32),
    seen=seen(0, 5, 12),
    recent=(0, 5, 12, 5),
    position=4,
    model="tiny",
    fingerprint=OURS,
    numerics="0123abcd",
    id=new_state_id(),
    parent=new_state_id(),
    created=1_700_000_000.25,
)
PACKED = pack(GOOD, NAMES)


def opened(data: bytes | memoryview) -> Blob:
    return unpack(data, DECODER, VOCAB_SIZE, OURS)


def same(one: Blob, other: Blob) -> bool:
    """To the bit."""
    arrays = [(*blob.tensors, blob.logits, blob.seen) for blob in (one, other)]
    as_bytes = [[(array.dtype, array.shape, array.tobytes()) for array in each] for each in arrays]
    rest = [{name: value for name, value in vars(blob).items() if name not in ("tensors", "logits", "seen")} for blob in (one, other)]
    return as_bytes[0] == as_bytes[1] and rest[0] == rest[1]


def test_a_state_survives_to_the_bit() -> None:
    assert same(opened(PACKED), GOOD)
    assert same(opened(memoryview(bytearray(PACKED))), GOOD)
    first = dataclasses.replace(GOOD, parent=None, recent=())
    assert same(opened(pack(first, NAMES)), first)


def test_the_arrays_do_not_share_memory_with_the_upload() -> None:
    upload = bytearray(PACKED)
    blob = opened(memoryview(upload))
    upload[:] = bytes(len(upload))
    assert same(blob, GOOD)


def test_any_reader_of_safetensors_reads_it() -> None:
    tensors = load(PACKED)
    assert list(tensors["recent"]) == [0, 5, 12, 5]
    assert np.array_equal(tensors["state_0_S"], GOOD.tensors[0])


def test_equal_states_have_equal_bytes() -> None:
    tensors = tuple(0 * tensor for tensor in GOOD.tensors)
    negative = tuple(np.copysign(tensor, -1) if tensor.dtype.kind == "f" else tensor for tensor in tensors)
    logits = 0 * GOOD.logits
    blobs = [
        pack(dataclasses.replace(GOOD, tensors=tensors, logits=logits), NAMES),
        pack(dataclasses.replace(GOOD, tensors=negative, logits=-logits), NAMES),
        pack(dataclasses.replace(GOOD, tensors=tuple(np.asfortranarray(tensor) for tensor in tensors), logits=logits[::-1]), NAMES),
    ]
    assert blobs[0] == blobs[1] == blobs[2]


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ABOVE_0 = st.floats(width=32, min_value=2.0**-149, allow_infinity=False)


@STEADY
@given(
    S=st.lists(FINITE, min_size=6, max_size=6),
    n=st.integers(-(2**63), 2**63 - 1),
    z=st.lists(ABOVE_0, min_size=3, max_size=3),
    logits=st.lists(FINITE | st.just(-np.inf), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=100),
    created=st.floats(min_value=1, max_value=1e12),
)
def test_any_state_survives_to_the_bit(S: list[float], n: int, z: list[float], logits: list[float], ids: list[int], created: float) -> None:
    blob = dataclasses.replace(
        GOOD,
        tensors=(np.array(S, np.float32).reshape(2, 3) + 0.0, np.array([n]), np.array(z, np.float32)),
        logits=np.array([0.0, *logits[1:]], np.float32) + 0.0,
        seen=seen(*ids),
        recent=tuple(ids[-64:]),
        position=len(ids),
        created=created,
    )
    assert same(opened(pack(blob, NAMES)), blob)
