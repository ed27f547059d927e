"""The inputs and outputs that the graphs of a bundle have."""

from collections.abc import Sequence
from typing import NamedTuple

from export.contract.names import (
    ATTENTION,
    ATTENTION_MASK,
    CU_SEQLENS,
    EMBEDDING,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    POOLED,
    POOLING_WEIGHT,
    POSITION_IDS,
    POSITIONS,
    PREVIOUS,
    STEP_LOGITS,
    TEXT_OF_TOKEN,
    TEXTS,
    TOKEN_EMBEDDINGS,
    TOKEN_OFFSET,
    TOKEN_TYPE_IDS,
    TOKENS,
    WANTED,
)
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


SOURCE = (int64(INPUT_IDS, "B", "N"), int64(ATTENTION_MASK, "B", "N"))  # inputs of encoders' graphs and readers


def encoder_interface(kind: Kind, width: int, d_model: str | int, *, typed: bool) -> Interface:
    """Return the inputs and outputs of the graph of an encoder, reranker or classifier.

    `width` is the length of a vector or the number of labels. With `typed`, token types are an input.
    """
    inputs, traits = (*SOURCE, int64(TOKEN_TYPE_IDS, "B", "N")) if typed else SOURCE, KINDS[kind]
    if traits.output == LOGITS:
        return Interface(inputs, (float32(LOGITS, "B", *["N"] * traits.per_token, width),))
    vectors = (float32(EMBEDDING, "B", width), float32(POOLED, "B", width), float32(TOKEN_EMBEDDINGS, "B", "N", d_model))
    return Interface(inputs, vectors)


def packed_interface(kind: Kind, width: int, *, typed: bool) -> Interface:
    """Return the inputs and outputs of the graph for GPUs of an encoder, reranker or classifier; arguments as in `encoder_interface`."""
    inputs = [int32(name, "T") for name in (INPUT_IDS, POSITION_IDS, TEXT_OF_TOKEN)]
    inputs += float32(POOLING_WEIGHT, "T"), int32(TEXTS, "B", 1), int32(TOKEN_OFFSET, "B", "N"), int32(CU_SEQLENS, "E")
    inputs += [int32(TOKEN_TYPE_IDS, "T")] * typed
    outputs = (LOGITS,) if KINDS[kind].output == LOGITS else (EMBEDDING, POOLED)
    return Interface(tuple(inputs), tuple(float32(name, "B", width) for name in outputs))


def decoder_interface(states: Sequence[StateTensor], vocab_size: int, *, takes_positions: bool) -> Interface:
    numbers = (int64(TOKENS, "B", "N"), int64(LENGTHS, "B"), *[int64(POSITIONS, "B")] * takes_positions, int64(WANTED, "B", "M"))
    before, after = (
        [Tensor(name=name, dtype=state.dtype, shape=("B", *axes)) for name, state, axes in zip(names, states, _axes(states), strict=True)]
        for names in ([state.name for state in states], [state.output for state in states])
    )
    return Interface((*numbers, *before), (float32(STEP_LOGITS, "B", "M", vocab_size), *after))


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
    outputs = (float32(STEP_LOGITS, "B", vocab_size), float32(ATTENTION, "B", "N"), *new)
    return Interface((int64(PREVIOUS, "B"), SOURCE[1], *remembered), outputs)
