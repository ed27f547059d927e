"""The inputs and outputs that the graphs of a bundle have."""

from collections.abc import Sequence
from typing import NamedTuple

from export.contract import names
from export.contract.retrieval import MultiVector, Sparse
from export.contract.tensors import KINDS, SLOTS, Kind, StateTensor, Tensor


class Interface(NamedTuple):
    """The input and output tensors of a graph."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def int64(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="int64", shape=shape)


def int32(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="int32", shape=shape)


def float32(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="float32", shape=shape)


SOURCE = (int64(names.INPUT_IDS, "B", "N"), int64(names.ATTENTION_MASK, "B", "N"))  # inputs of encoders' graphs and readers


def encoder_interface(
    kind: Kind,
    width: int,
    d_model: str | int,
    *,
    typed: bool,
    dense: bool = True,
    sparse: Sparse | None = None,
    multivector: MultiVector | None = None,
) -> Interface:
    """Return the inputs and outputs of the graph of an encoder, reranker or classifier. `width`: of a vector or the labels. `typed`: with
    token types. `dense`: with a vector of a whole text.
    """
    inputs, traits = (*SOURCE, int64(names.TOKEN_TYPE_IDS, "B", "N")) if typed else SOURCE, KINDS[kind]
    if traits.output == names.LOGITS:
        return Interface(inputs, (float32(names.LOGITS, "B", *["N"] * traits.per_token, width),))
    vectors = [float32(names.EMBEDDING, "B", width), float32(names.POOLED, "B", width)] * dense
    vectors.append(float32(names.TOKEN_EMBEDDINGS, "B", "N", d_model))
    if sparse is not None:
        vectors.append(float32(names.TOKEN_WEIGHTS, "B", "N") if sparse.by_token else float32(names.SPARSE, "B", sparse.size))
    if multivector is not None:
        vectors.append(float32(names.MULTIVECTOR, "B", "N", multivector.width))
    return Interface(inputs, tuple(vectors))


def packed_interface(kind: Kind, width: int, *, typed: bool) -> Interface:
    """Return the inputs and outputs of the graph for GPUs of an encoder, reranker or classifier; arguments as in `encoder_interface`."""
    inputs = [int32(name, "T") for name in (names.INPUT_IDS, names.POSITION_IDS, names.TEXT_OF_TOKEN)]
    inputs += (
        float32(names.POOLING_WEIGHT, "T"),
        int32(names.TEXTS, "B", 1),
        int32(names.TOKEN_OFFSET, "B", "N"),
        int32(names.CU_SEQLENS, "E"),
    )
    inputs += [int32(names.TOKEN_TYPE_IDS, "T")] * typed
    outputs = (names.LOGITS,) if KINDS[kind].output == names.LOGITS else (names.EMBEDDING, names.POOLED)
    return Interface(tuple(inputs), tuple(float32(name, "B", width) for name in outputs))


def decoder_interface(states: Sequence[StateTensor], vocab_size: int, *, takes_positions: bool) -> Interface:
    numbers = (
        int64(names.TOKENS, "B", "N"),
        int64(names.LENGTHS, "B"),
        *[int64(names.POSITIONS, "B")] * takes_positions,
        int64(names.WANTED, "B", "M"),
    )
    before, after = (
        [Tensor(name=name, dtype=state.dtype, shape=("B", *axes)) for name, state, axes in zip(given, states, _axes(states), strict=True)]
        for given in ([state.name for state in states], [state.output for state in states])
    )
    return Interface((*numbers, *before), (float32(names.STEP_LOGITS, "B", "M", vocab_size), *after))


def has_slots(tensor: Tensor) -> bool:
    """Whether an input or output of a decoder's graph has an axis of slots."""
    return any(isinstance(axis, str) and axis.startswith(SLOTS) for axis in tensor.shape)


def _axes(states: Sequence[StateTensor]) -> list[tuple[str | int, ...]]:
    most = max((state.shape[1] for state in states if state.slots), default=0)
    slots = {state.name: SLOTS if state.shape[1] == most else f"{SLOTS}{state.shape[1]}" for state in states if state.slots}
    return [(state.shape[0], slots[state.name], state.shape[2]) if state.slots else state.shape for state in states]


def step_interface(remembered: Sequence[Tensor], vocab_size: int) -> Interface:
    """Return the inputs and outputs of an encoder-decoder's step graph. `remembered` are the outputs of its reader graph."""
    new = [tensor.model_copy(update={"name": f"new_{tensor.name}"}) for tensor in remembered if not tensor.name.startswith("memory_")]
    outputs = (float32(names.STEP_LOGITS, "B", vocab_size), float32(names.ATTENTION, "B", "N"), *new)
    return Interface((int64(names.PREVIOUS, "B"), SOURCE[1], *remembered), outputs)
