"""A request to an encoder and its answer. `EncodeRequest` has a client's inputs, `EncodeTask` has token ids for an engine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from service.call import NUMBER_BYTES
from service.errors import ServiceError
from service.runtime.lanes import Origin, Spent
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Cutting, Encoded, Input

NO_DEADLINE = math.inf

Row = tuple[Array, ...]  # what was asked of one input: an array for each of the task's outputs
RowOrError = Row | ServiceError
OnRow = Callable[[int, RowOrError], None]  # called with an input's index and row, as soon as the row is computed


@dataclass(slots=True, kw_only=True)
class EncodeRequest:
    """A client's inputs, and the outputs to compute for them. `Model.answer` runs it with the deadline, client and lane of a `Call`.

    `row_width`, `number_bytes` and `padded` give the size of the answer, which is checked before anything is computed.
    """

    inputs: Sequence[Input]
    outputs: tuple[str, ...] = ()  # names of the graph's outputs; (): the model's default output
    named: tuple[str, ...] = ()  # outputs whose spaces the answer has, if vectors of others are made of `outputs`
    cut: Cut | None = None  # how to shorten long inputs; None: as the setting `auto_truncate` says
    queries: int | None = None  # so many of the first inputs are queries, the others documents; None: the client did not say
    prompt: str | None = None  # prompt that is put before each text; None: that of its role, without a role the default prompt
    row_width: int | None = None  # how many numbers of each vector are sent; None: all numbers
    number_bytes: float = NUMBER_BYTES  # bytes of a number in the answer
    bytes_by_output: Mapping[str, float] = field(default_factory=dict)  # the same for outputs whose numbers have another form
    padded: bool = False  # whether each row is padded to the longest row


@dataclass(frozen=True, kw_only=True)
class EncodeTask(Origin):
    """Token ids, and the outputs that an engine computes for them in one run, in this process or in a pool.

    A row has an array for each output: a vector (D,), the vectors of N tokens (N, D), L logits (L,), all float32; a token matrix
    (N, D) in float16, so that a cached one has the same bits; or a sparse vector in the form of `sparse.py`.
    """

    inputs: Sequence[Encoded]
    outputs: tuple[str, ...]
    content: int = 0  # hash of the request's body
    use_cache: bool = True
    spent: Spent = field(default_factory=Spent)  # the engine adds the times of this task to it
    on_row: OnRow | None = None

    @property
    def tokens(self) -> int:
        return sum(len(each.ids) for each in self.inputs)


@dataclass(slots=True)
class EncodeAnswer:
    """The rows of one request, in the order of the request's inputs. A row can be an error only if `call.item_errors` is set."""

    rows: list[RowOrError]
    encoded: list[Encoded | ServiceError]
    space: str = ""  # ids of the outputs' embedding spaces, separated by commas; "" without vectors
    n_tokens: int = field(init=False)  # tokens of all inputs, cached inputs included
    truncated: list[Cutting] = field(init=False)

    def __post_init__(self) -> None:
        self.n_tokens, self.truncated = 0, []
        for at, item in enumerate(self.encoded):
            if isinstance(item, Encoded):
                self.n_tokens += len(item.ids)
                if item.truncated:
                    self.truncated.append(Cutting(at, item.n_tokens, len(item.ids)))
