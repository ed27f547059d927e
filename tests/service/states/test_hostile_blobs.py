"""Bytes that are no state of the model are refused with the reason. What they claim costs no memory."""

import contextlib
import dataclasses
import json
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export import contract
from service.errors import InvalidRequest
from service.states.blob import MOST_BYTES, Blob, check_header, header_end, pack, read_header
from service.states.validity import check_numbers
from tests.service.fakes import case
from tests.service.states.test_blob import DECODER, GOOD, NAMES, OURS, PACKED, STEADY, VOCAB_SIZE, opened

END = header_end(PACKED)
HEADER: dict[str, Any] = json.loads(PACKED[8:END])
SIZE = len(PACKED) - END  # of the data


def with_header(header: Any, data: bytes = PACKED[END:]) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def put(*place: Any) -> bytes:
    """The good bytes with one value of the header replaced: put(key, .., value)."""
    *keys, last, value = place
    header = json.loads(PACKED[8:END])
    inner = header
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return with_header(header)


def without(*place: str) -> bytes:
    *keys, last = place
    header = json.loads(PACKED[8:END])
    inner = header
    for key in keys:
        inner = inner[key]
    del inner[last]
    return with_header(header)


def moved(by: int) -> dict[str, Any]:
    """The header with every tensor `by` bytes later."""
    return {
        name: entry if name == "__metadata__" else entry | {"data_offsets": [at + by for at in entry["data_offsets"]]}
        for name, entry in HEADER.items()
    }


def told(**metadata: Any) -> bytes:
    return with_header(HEADER | {"__metadata__": HEADER["__metadata__"] | metadata})


def with_numbers(**changes: Any) -> bytes:
    return pack(dataclasses.replace(GOOD, **changes), NAMES)


def with_tensor(at: int, tensor: Any) -> bytes:
    return with_numbers(tensors=(*GOOD.tensors[:at], tensor, *GOOD.tensors[at + 1 :]))


S, N, Z = GOOD.tensors
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "has 0 bytes, and the length of its header alone has 8"),
    "a pickle": (lambda: pickle.dumps({"state": [1, 2, 3]}), "a header of [0-9]+ bytes"),
    "no header": (lambda: bytes(8), "a header of 0 bytes, and one has 2 to 262144"),
    "a huge header": (lambda: b"\xff" * 8, "a header of 18446744073709551615 bytes"),
    "a header just too long": (lambda: (2**18 + 1).to_bytes(8, "little") + PACKED[8:], "a header of 262145 bytes"),
    "a header longer than the file": (lambda: (2**18).to_bytes(8, "little") + PACKED[8:], "its header ends after 262152"),
    "a byte more": (lambda: PACKED + b"\0", f"has {len(PACKED) + 1} bytes, and its header describes {len(PACKED)}"),
    "no JSON": (lambda: with_header(b'{"__metadata__"}'), "a header that cannot be read .*, and it is JSON"),
    "no UTF-8": (lambda: with_header(b'{"\xff": 1}'), "a header that cannot be read"),
    "UTF-16": (lambda: with_header(json.dumps(HEADER).encode("utf-16")), "begins with b'.xff', and it is a JSON object"),
    "a list": (lambda: with_header([]), r"begins with b'\[', and it is a JSON object"),
    "deep": (lambda: with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested 4 deep, and 3 is the most"),
    "not a number": (lambda: put("logits", "shape", [float("nan")]), "'NaN' is no integer"),
    "a fraction": (lambda: put("logits", "shape", [13.0]), "'13.0' is no integer"),
    "many digits": (lambda: with_header(b'{"a":' + b"9" * 10_000 + b"}"), "cannot be read"),
    "a tensor twice": (lambda: with_header(PACKED[8 : END - 1].rstrip(b" }") + b'},"seen":{}}'), "a key is there twice"),
    "a key twice": (lambda: with_header(PACKED[8:END].replace(b'"dtype":"U8"', b'"dtype":"U8","dtype":"U8"')), "a key is there twice"),
    "no metadata": (lambda: without("__metadata__"), "has no metadata"),
    "other metadata": (lambda: told(colour="red"), "has not the metadata of a state .'colour'."),
    "a field less": (lambda: without("__metadata__", "numerics"), "has not the metadata of a state .'numerics'."),
    "another format": (lambda: told(format="attnserve-state-2"), "the format 'attnserve-state-2', and 'attnserve-state-1' is the one"),
    "no format": (lambda: without("__metadata__", "format"), "the format None"),
    "another model": (lambda: told(fingerprint="theirs"), "of the bundle with fingerprint 'theirs' and this model's is 'ours'"),
    "a long model": (lambda: told(model="m" * 257), "has model='mmm"),
    "a path": (lambda: told(model="../../secret"), "has model='../../secret', and its form is"),
    "an id": (lambda: told(id="state_1"), "has id='state_1', and its form is"),
    "an id and a line": (lambda: told(id=GOOD.id + "\n"), "has id='state_"),
    "no parent": (lambda: told(parent=None), "has parent=None"),
    "a moment": (lambda: told(created="nan"), "has created='nan'"),
    "numerics": (lambda: told(numerics=""), "has numerics=''"),
    "position 0": (lambda: told(position="0"), "has position='0'"),
    "a number as position": (lambda: told(position=4), "has position=4"),
    "below 0": (lambda: told(position="-4"), "has position='-4'"),
    "beyond": (lambda: told(position="101"), "its position is 101, and the most is 100"),
    "a huge position": (lambda: told(position="9" * 19), "has position='999"),
    "a tensor less": (lambda: with_header({k: v for k, v in HEADER.items() if k != "seen"}, PACKED[END:-2]), "has no tensor seen"),
    "a tensor more": (
        lambda: with_header(HEADER | {"state_7_S": {"dtype": "U8", "shape": [0], "data_offsets": [SIZE, SIZE]}}),
        "a tensor 'state_7_S', and a state of this model has none",
    ),
    "no object": (lambda: put("logits", []), "describes 'logits' otherwise"),
    "another key": (lambda: put("logits", "strides", [1]), "describes 'logits' otherwise"),
    "no shape": (lambda: without("logits", "shape"), "describes 'logits' otherwise"),
    "an unknown dtype": (lambda: put("logits", "dtype", "F64"), "the dtype 'F64' for 'logits'"),
    "a list as dtype": (lambda: put("logits", "dtype", ["F32"]), "the dtype .'F32'. for 'logits'"),
    "another dtype": (lambda: put("state_1_z", "dtype", "I32"), "state_1_z has the dtype int32, not float32"),
    "int64 logits": (lambda: with_numbers(logits=GOOD.logits.astype(np.int64)), "has logits .13,. of I64, and this model has .13,. of F32"),
    "another shape": (lambda: put("state_0_S", "shape", [3, 2]), r"state_0_S has the shape \(3, 2\), not \(2, 3\)"),
    "more axes": (lambda: put("state_0_S", "shape", [2, 3] + [1] * 15), "the shape .*these are whole numbers"),
    "a huge axis": (lambda: put("state_0_S", "shape", [2**60, 3]), "the shape .1152921504606846976, 3. for 'state_0_S'"),
    "huge axes": (lambda: put("state_0_S", "shape", [2**30] * 16), "has 24 bytes for 'state_0_S'"),
    "an axis below 0": (lambda: put("state_0_S", "shape", [-2, -3]), "the shape .-2, -3."),
    "true": (lambda: put("state_0_n", "shape", [True]), "the shape .True."),
    "a word": (lambda: put("state_0_n", "shape", ["1"]), "the shape"),
    "null": (lambda: put("state_0_n", "shape", None), "the shape None"),
    "a place below 0": (lambda: put("logits", "data_offsets", [-52, 0]), "the data_offsets .-52, 0. for 'logits'"),
    "a huge place": (lambda: put("logits", "data_offsets", [2**60, 2**60 + 52]), "the data_offsets .1152921504606846976, "),
    "backwards": (lambda: put("logits", "data_offsets", [100, 48]), "has -52 bytes for 'logits'"),
    "three places": (lambda: put("logits", "data_offsets", [0, 52, 52]), "the data_offsets"),
    "overlapping": (lambda: put("seen", "data_offsets", [SIZE - 3, SIZE - 1]), f"'seen' at byte {SIZE - 3} .* before ends at {SIZE - 2}"),
    "the same place": (lambda: put("state_1_z", "data_offsets", [8, 20]), "at byte 8 of its data, and the tensor before ends at 20"),
    "a gap": (lambda: put("seen", "data_offsets", [n + 1 for n in HEADER["seen"]["data_offsets"]]), "'seen' at byte"),
    "a gap at first": (lambda: with_header(moved(8), bytes(8) + PACKED[END:]), "at byte 8 of its data, and the tensor before ends at 0"),
    "another vocabulary": (lambda: with_numbers(logits=GOOD.logits[:-1]), "has logits .12,. of F32, and this model has .13,."),
    "another row of bits": (lambda: with_numbers(seen=np.zeros(3, np.uint8)), "has seen .3,. of U8, and this model has .2,."),
    "more than 64 ids": (lambda: with_numbers(recent=(5,) * 65, position=99), "has recent .65,. of I32, and this model has .64,."),
    "more ids than tokens": (lambda: with_numbers(recent=(5,) * 5), "has recent .5,. of I32, and this model has .4,."),
    "NaN": (lambda: with_tensor(0, S * np.float32(np.nan)), "state_0_S has numbers that are not finite"),
    "infinity": (lambda: with_tensor(0, np.full_like(S, -np.inf)), "state_0_S has numbers that are not finite"),
    "z of 0": (lambda: with_tensor(2, 0 * Z), "state_1_z has numbers that are not above 0"),
    "z below 0": (lambda: with_tensor(2, -Z), "state_1_z has numbers that are not above 0"),
    "a NaN logit": (lambda: with_numbers(logits=GOOD.logits * np.float32(np.nan)), "logits has numbers that are not finite"),
    "one NaN logit": (lambda: with_numbers(logits=np.append(GOOD.logits[:-1], np.float32(np.nan))), "logits has numbers that are not"),
    "an infinite logit": (lambda: with_numbers(logits=np.full_like(GOOD.logits, np.inf)), "logits has numbers that are not finite"),
    "no logit": (lambda: with_numbers(logits=np.full_like(GOOD.logits, -np.inf)), "logits has numbers that are not finite"),
    "an id of 13": (lambda: with_numbers(recent=(13,)), "recent tokens from 13 to 13, and this model's vocabulary has 13"),
    "an id of -1": (lambda: with_numbers(recent=(-1, 5)), "recent tokens from -1 to 5"),
    "a bit of 13": (lambda: with_numbers(seen=GOOD.seen | np.array([0, 32], np.uint8)), "has seen tokens above 12"),
    "nothing seen": (lambda: with_numbers(seen=0 * GOOD.seen, recent=()), "has seen 0 different tokens, and its position is 4"),
    "too many seen": (lambda: with_numbers(position=2, recent=(5,)), "has seen 3 different tokens, and its position is 2"),
    "recent and not seen": (lambda: with_numbers(recent=(1,)), "recent tokens that it has not seen"),
}  # fmt: skip


def test_other_bytes_are_refused_with_the_reason() -> None:
    for name, (made, words) in CASES.items():
        with case(name), pytest.raises(InvalidRequest, match=words) as refusal:
            opened(made())
        assert "again" in refusal.value.message, name  # the next step


@pytest.mark.parametrize(("count", "valid"), [(0, False), (1, True), (1.5, False), (4, True), (5, False)])
def test_a_state_counts_at_most_the_tokens_before_its_position(count: float, valid: bool) -> None:
    spec = contract.StateTensor(name="state_0_n", shape=(1,), holds="count")
    with contextlib.nullcontext() if valid else pytest.raises(InvalidRequest, match="counts other tokens than its position, 4"):
        check_numbers(spec, np.array([count], np.float32), 4)


def test_a_file_cut_anywhere_is_refused() -> None:
    for end in range(len(PACKED)):
        with pytest.raises(InvalidRequest):
            opened(PACKED[:end])


def test_the_size_is_known_from_the_head() -> None:
    for end in range(len(PACKED)):
        if end >= END:
            assert check_header(PACKED[:end]) == len(PACKED)
        else:
            with pytest.raises(InvalidRequest):
                check_header(PACKED[:end])
    header = read_header(memoryview(PACKED)[:END])
    assert (header.model, header.position, header.begin) == ("tiny", 4, END)
    header.check(DECODER, VOCAB_SIZE, OURS)


def test_a_blob_larger_than_any_state_is_refused_from_its_head() -> None:
    header = {"__metadata__": HEADER["__metadata__"], "a": {"dtype": "U8", "shape": [MOST_BYTES], "data_offsets": [0, MOST_BYTES]}}
    with pytest.raises(InvalidRequest, match=f"bytes, and {MOST_BYTES} are the most"):
        check_header(with_header(header, b""))


def refused_or_read(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(opened(data), Blob)


def test_a_changed_bit_anywhere_is_refused_or_read_and_nothing_else() -> None:
    """A bit of the data can give another valid number; the store's hash is what notices that."""
    for at in range(len(PACKED)):
        for bit in range(8):
            refused_or_read(PACKED[:at] + bytes([PACKED[at] ^ (1 << bit)]) + PACKED[at + 1 :])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PLACES = [
    *((name,) for name in HEADER),
    *((name, key) for name, entry in HEADER.items() for key in entry),
    *((name, "data_offsets", at) for name in HEADER if name != "__metadata__" for at in (0, 1)),
    *((name, "shape", 0) for name in HEADER if name != "__metadata__"),
]


@STEADY
@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_value_in_any_place_of_the_header_is_refused_or_read(place: tuple[Any, ...], value: Any) -> None:
    refused_or_read(put(*place, value))


LIES = {
    "a huge header": b"\xff" * 8 + PACKED[8:],
    "huge axes": put("state_0_S", "shape", [2**30] * 16),
    "a huge axis": put("state_0_S", "shape", [2**60]),
    "no columns": put("state_0_S", "shape", [2**30, 0]),
    "a huge place": put("logits", "data_offsets", [2**62, 2**62 + 52]),
    "a large tensor": with_header(HEADER | {"seen": {"dtype": "U8", "shape": [2**29], "data_offsets": [SIZE - 2, SIZE - 2 + 2**29]}}),
    "deep": with_header(b'{"a":' + b"[" * 100_000),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_what_a_header_claims_costs_no_memory(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        opened(data)  # what is imported or cached at first
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            opened(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**16 + 4 * len(data)
