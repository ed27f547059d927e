"""The portable form of one state: a safetensors file with everything that a run needs to continue. It is checked before it is used.

  8 bytes   N, the length of the header (little-endian)
  N bytes   the header, JSON: `__metadata__` with the fields of `_FIELDS` as text; for each tensor its dtype, shape and place in the data
  the rest  the data of the tensors, one after the other

The tensors are the manifest's states, each without the batch axis B, and the fields `logits`, `seen` and `recent` of `Blob`. Equal states
give equal bytes, so a hash identifies a state.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.errors import InvalidRequest
from service.states.record import ID
from service.states.validity import AGAIN, check_bundle, check_form, check_logits, check_numbers, check_position

FORMAT = "attnserve-state-1"
MOST_RECENT = 64  # most token ids in `recent`: enough for an incomplete character and for the end of a turn in a chat template
PREFIX_BYTES = 8  # size in bytes of the number that is the header's length
MOST_HEADER_BYTES = 2**18  # the largest header in bytes: enough for about 2,000 tensors
MOST_BYTES = contract.MOST_STATE_BYTES + 2**27  # the largest blob; the largest vocabulary's logits have 2**26 bytes

_METADATA = "__metadata__"
_LOGITS, _SEEN, _RECENT = "logits", "seen", "recent"
_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FIELDS = {  # Field of the metadata -> its pattern. `parent` may be absent.
    "created": re.compile(r"[0-9]{1,15}\.[0-9]{1,18}"),
    "fingerprint": re.compile(r"[!-~]{1,128}"),
    "format": re.compile(re.escape(FORMAT)),
    "id": ID,
    "model": re.compile(contract.NAME.replace("*$", "{0,255}")),
    "numerics": re.compile(r"[0-9a-f]{1,64}"),
    "parent": ID,
    "position": re.compile(r"[1-9][0-9]{0,17}"),
}
_DEPTH = 3  # nesting depth of the header: the object, a tensor, its shape


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A state after the tokens of one sequence, with its origin. The arrays are never changed."""

    tensors: tuple[NDArray[Any], ...]  # the state tensors, each without the batch axis B, in the order of the decoder's states
    logits: NDArray[np.float32]  # (V,) logits of the next token
    seen: NDArray[np.uint8]  # ((V + 7) // 8,): bit i % 8 of byte i // 8 is 1 if the token i was fed
    recent: tuple[int, ...]  # ids of the most recently fed tokens, at most MOST_RECENT, the newest last
    position: int  # number of tokens fed to the state
    model: str
    fingerprint: str  # fingerprint of the model's bundle
    numerics: str  # fingerprint of the arithmetic that computed the state; see `numerics.py`
    id: str
    parent: str | None
    created: float  # seconds since 1970


class _Entry(NamedTuple):
    """A tensor as the header describes it: `begin` and `end` are its place in the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a blob. Its fields are consistent with each other; `check` compares them with a model."""

    entries: dict[str, _Entry]
    metadata: dict[str, str]
    begin: int  # position of the data, in bytes from the start of the blob
    size: int  # bytes of the whole blob

    @property
    def model(self) -> str:
        """Return the name of the model to which the state belongs."""
        return self.metadata["model"]

    @property
    def position(self) -> int:
        """Return the number of tokens that were fed to the state."""
        return int(self.metadata["position"])

    def check(self, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> None:
        """Raise InvalidRequest if this is not the header of a state of the model."""
        check_bundle(self.metadata["fingerprint"], fingerprint)
        check_position(self.position, decoder, least=1)
        specs = {spec.name: spec for spec in decoder.states}
        expected = {*specs, _LOGITS, _SEEN, _RECENT}
        if missing := expected - set(self.entries):
            raise _refused(f"has no tensor {min(missing)}", f"a state of this model has {len(expected)} tensors")
        if more := set(self.entries) - expected:
            raise _refused(f"has a tensor {min(more)!r:.80}", "a state of this model has none of this name")
        for name, spec in specs.items():
            check_form(spec, self.entries[name].shape, self.entries[name].dtype, self.position)
        logits, seen, recent = (self.entries[name] for name in (_LOGITS, _SEEN, _RECENT))
        _same(_LOGITS, logits, (vocab_size,), "F32")
        _same(_SEEN, seen, ((vocab_size + 7) // 8,), "U8")
        _same(_RECENT, recent, (min(recent.shape[0] if recent.shape else 0, MOST_RECENT, self.position),), "I32")


def pack(blob: Blob, names: Sequence[str]) -> bytes:
    """Return the bytes of a state. `names` are the names of `blob.tensors` in the manifest, in the same order.

    -0.0 becomes 0.0. The sign of a zero can depend on the other rows in the batch, so equal states could otherwise have different bytes.
    """
    tensors: dict[str, NDArray[Any]] = dict(zip(names, blob.tensors, strict=True))
    tensors |= {_LOGITS: blob.logits, _SEEN: blob.seen, _RECENT: np.array(blob.recent, np.int32)}
    header: dict[str, Any] = {
        _METADATA: {
            "created": repr(float(blob.created)),
            "fingerprint": blob.fingerprint,
            "format": FORMAT,
            "id": blob.id,
            "model": blob.model,
            "numerics": blob.numerics,
            **({} if blob.parent is None else {"parent": blob.parent}),
            "position": str(blob.position),
        }
    }
    parts, at = [], 0
    # Tensors whose items have the most bytes come first, so that each tensor is aligned to the size of its items.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        little = (tensor + 0.0 if tensor.dtype.kind == "f" else tensor).astype(tensor.dtype.newbyteorder("<"), copy=False)
        parts.append(little.tobytes())
        header[name] = {"dtype": _NAMES[little.dtype], "shape": little.shape, "data_offsets": (at, at := at + len(parts[-1]))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return b"".join((len(text).to_bytes(PREFIX_BYTES, "little"), text, *parts))


def unpack(data: bytes | memoryview, decoder: contract.Decoder, vocab_size: int, fingerprint: str) -> Blob:
    """Return the state that `data` contains. Nothing is copied or allocated before the header is checked.

    Raises InvalidRequest if the bytes are not a packed state of this model: another format, missing or additional bytes, another bundle,
    other tensors, numbers that are not finite, token ids outside the vocabulary.
    """
    view = memoryview(data).cast("B")
    header = read_header(view)
    if len(view) != header.size:
        raise _refused(f"has {len(view)} bytes", f"its header describes {header.size}")
    header.check(decoder, vocab_size, fingerprint)
    entries, metadata, position = header.entries, header.metadata, header.position

    def read(name: str) -> NDArray[Any]:
        """Copy a tensor, because the caller may change `data` later."""
        entry, bytes_ = entries[name], view[header.begin + entries[name].begin : header.begin + entries[name].end]
        return np.frombuffer(bytes_, entry.dtype).reshape(entry.shape).astype(entry.dtype.newbyteorder("="), copy=True)

    tensors = tuple(read(spec.name) for spec in decoder.states)
    for spec, tensor in zip(decoder.states, tensors, strict=True):
        check_numbers(spec, tensor, position)
    logits, seen, recent = read(_LOGITS), read(_SEEN), read(_RECENT)
    check_logits(_LOGITS, logits, vocab_size)
    _check_tokens(seen, recent, position, vocab_size)
    return Blob(
        tensors=tensors,
        logits=logits,
        seen=seen,
        recent=tuple(recent.tolist()),
        position=position,
        model=metadata["model"],
        fingerprint=metadata["fingerprint"],
        numerics=metadata["numerics"],
        id=metadata["id"],
        parent=metadata.get("parent"),
        created=float(metadata["created"]),
    )


def check_header(first_bytes: bytes | memoryview) -> int:
    """Return the size in bytes of a whole blob. `first_bytes` must contain its header. Raises InvalidRequest as `read_header` does."""
    return read_header(first_bytes).size


def header_end(first_bytes: bytes | memoryview) -> int:
    """Return the number of bytes before the data, computed from a blob's first 8 bytes. Raises InvalidRequest if the number is invalid."""
    if len(first_bytes) < PREFIX_BYTES:
        raise _refused(f"has {len(first_bytes)} bytes", f"the length of its header alone has {PREFIX_BYTES}")
    length = int.from_bytes(first_bytes[:PREFIX_BYTES], "little")
    if not 2 <= length <= MOST_HEADER_BYTES:
        raise _refused(f"has a header of {length} bytes", f"one has 2 to {MOST_HEADER_BYTES}")
    return PREFIX_BYTES + length


def read_header(first_bytes: bytes | memoryview) -> Header:
    """Read a header from the first bytes of a blob. More bytes of the blob may follow.

    Raises InvalidRequest if the header is incomplete, too long, not valid JSON or nested too deeply, if it has unknown or repeated keys or
    values of a wrong form, or if its tensors overlap or leave gaps.
    """
    end = header_end(first_bytes)
    if len(first_bytes) < end:
        raise _refused(f"has {len(first_bytes)} bytes", f"its header ends after {end}")
    content = _json(bytes(first_bytes[PREFIX_BYTES:end]))
    metadata = _metadata(content.pop(_METADATA, None))
    entries = {name: _entry(name, each) for name, each in content.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise _refused(f"has {name!r:.80} at byte {entry.begin} of its data", f"the tensor before ends at {at}: they follow each other")
        at = entry.end
    if end + at > MOST_BYTES:
        raise _refused(f"is of {end + at} bytes", f"{MOST_BYTES} are the most")
    return Header(entries, metadata, begin=end, size=end + at)


# ---------------------------------------------------------------------------------------------------------------------------------------


def _refused(found: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"the blob of a state is refused: it {found}, and {expected}; {AGAIN}")


def _json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises InvalidRequest if it is nested too deeply, repeats a key, or has a fractional number."""
    if not text.startswith(b"{"):
        raise _refused(f"has a header that begins with {text[:1]!r}", "it is a JSON object")
    depth = 0
    for byte in text.translate(None, _NO_BRACKETS):  # counts brackets in strings too, because a valid header has none there
        depth += 1 if byte in b"[{" else -1
        if depth > _DEPTH:
            raise _refused(f"has a header nested {depth} deep", f"{_DEPTH} is the most")
    try:
        content: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=_once, parse_float=_no_number, parse_constant=_no_number)
    except ValueError as error:  # raised for invalid JSON, invalid UTF-8 and integers of too many digits
        raise _refused(f"has a header that cannot be read ({error!s:.120})", "it is JSON") from error
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text[:20]!r} is no integer")


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _metadata(content: Any) -> dict[str, str]:
    if not isinstance(content, dict):
        raise _refused("has no metadata", f"`{_METADATA}` has {', '.join(_FIELDS)}")
    if content.get("format") != FORMAT:
        raise _refused(f"is of the format {content.get('format')!r:.80}", f"{FORMAT!r} is the one that is read here")
    if odd := set(_FIELDS) - {"parent"} ^ set(content) - {"parent"}:
        raise _refused(f"has not the metadata of a state ({min(odd)!r:.80})", f"`{_METADATA}` has {', '.join(_FIELDS)}")
    for name, value in content.items():
        if not (isinstance(value, str) and _FIELDS[name].fullmatch(value)):
            raise _refused(f"has {name}={value!r:.80}", f"its form is {_FIELDS[name].pattern}")
    return content


def _entry(name: str, content: Any) -> _Entry:
    """Return the description of a tensor. Raises InvalidRequest unless its number of bytes in the data matches its shape and dtype."""
    if not (isinstance(content, dict) and set(content) == {"dtype", "shape", "data_offsets"}):
        raise _refused(f"describes {name!r:.80} otherwise", "a tensor has dtype, shape, data_offsets")
    dtype, shape, offsets = content["dtype"], content["shape"], content["data_offsets"]
    if not (isinstance(dtype, str) and dtype in _DTYPES):
        raise _refused(f"has the dtype {dtype!r:.80} for {name!r:.80}", f"a tensor has one of {', '.join(_DTYPES)}")
    for what, numbers, lengths in (("shape", shape, range(17)), ("data_offsets", offsets, (2,))):
        if not (isinstance(numbers, list) and len(numbers) in lengths and all(type(n) is int and 0 <= n <= MOST_BYTES for n in numbers)):
            raise _refused(f"has the {what} {numbers!r:.80} for {name!r:.80}", f"these are whole numbers from 0 to {MOST_BYTES}")
    begin, end = offsets
    entry = _Entry(_DTYPES[dtype], tuple(shape), begin, end)
    if (size := math.prod(shape) * entry.dtype.itemsize) != entry.end - entry.begin:
        raise _refused(f"has {entry.end - entry.begin} bytes for {name!r:.80}", f"a tensor {entry.shape} of {dtype} has {size}")
    return entry


def _same(name: str, entry: _Entry, shape: tuple[int, ...], dtype: str) -> None:
    if entry.shape != shape or entry.dtype != _DTYPES[dtype]:
        raise _refused(f"has {name} {entry.shape} of {_NAMES[entry.dtype]}", f"this model has {shape} of {dtype}")


def _check_tokens(seen: NDArray[np.uint8], recent: NDArray[np.int32], position: int, vocab_size: int) -> None:
    """Raise InvalidRequest if `seen` and `recent` cannot come from a sequence of `position` tokens."""
    fed = np.unpackbits(seen, bitorder="little")
    if fed[vocab_size:].any():
        raise _refused(f"has seen tokens above {vocab_size - 1}", f"this model's vocabulary has {vocab_size} tokens")
    if not 1 <= (n_fed := int(fed.sum())) <= position:
        raise _refused(f"has seen {n_fed} different tokens", f"its position is {position}")
    if recent.size and not 0 <= recent.min() <= recent.max() < vocab_size:
        raise _refused(f"has recent tokens from {recent.min()} to {recent.max()}", f"this model's vocabulary has {vocab_size} tokens")
    if not fed[recent].all():
        raise _refused("has recent tokens that it has not seen", "`seen` has all tokens that were fed")
