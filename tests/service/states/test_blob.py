"""A state survives packing to the bit. Any other bytes are refused with the reason, and cost no memory."""

import dataclasses
from typing import Any

import numpy as np
from safetensors.numpy import load

from export import contract
from service.states.blob import Blob, pack, unpack
from service.states.record import new_state_id

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
