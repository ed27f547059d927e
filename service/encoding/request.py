"""A request to an encoder and its answer: `EncodeRequest` in a client's terms, `EncodeTask` the same as token ids for an engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.call import NUMBER_BYTES
from service.errors import ServiceError
from service.runtime.lanes import Lane, Spent
from service.runtime.onnx import Array
from service.tokenization.texts import Cut, Cutting, Encoded, Input

NO_DEADLINE = math.inf

RowOrError = Array | ServiceError
OnRow = Callable[[int, RowOrError], None]  # is given the index of an input and its row, as soon as that is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """Inputs, and the rows to compute for them. `Model.answer` runs it, with the deadline, client and lane of a `Call`.

    The last three bound the size of the answer before it is computed.
    """

    inputs: Sequence[Input]
    output: str | None = None  # of the graph; None: the model's default
    cut: Cut | None = None  # None: by the setting `auto_truncate`
    prompt: str | None = None  # put before each text; None: the model's default
    row_width: int | None = None  # numbers of each row in the answer; None: all
    number_bytes: float = NUMBER_BYTES  # of each number in the answer
    padded: bool = False  # every row has as many tokens as the longest


@dataclass(slots=True, kw_only=True)
class EncodeTask:
    """Token ids, and the rows to compute for them, by an engine of this process or of a pool.

    A row is float32: (D,) of a vector, (N, D) of token vectors, (L,) of logits.
    """

    inputs: Sequence[Encoded]
    output: str
    lane: Lane = Lane.INTERACTIVE
    deadline: float = NO_DEADLINE  # in `time.monotonic()` seconds
    client: str = ""  # takes its share of the queue; "": counts as all clients
    traceparent: str | None = None  # None: not traced
    use_cache: bool = True
    spent: Spent = field(default_factory=Spent)  # added to
    on_row: OnRow | None = None

    @property
    def tokens(self) -> int:
        return sum(len(each.ids) for each in self.inputs)


@dataclass(frozen=True)
class EncodeAnswer:
    """The rows of one request, in the order of its inputs. A row is an error only if the request asked for errors by item."""

    rows: list[RowOrError]
    encoded: list[Encoded | ServiceError]

    @property
    def n_tokens(self) -> int:
        """Tokens of all inputs, cached ones included."""
        return sum(len(item.ids) for item in self.encoded if isinstance(item, Encoded))

    @property
    def truncated(self) -> list[Cutting]:
        return [
            Cutting(at, item.n_tokens, len(item.ids))
            for at, item in enumerate(self.encoded)
            if isinstance(item, Encoded) and item.truncated
        ]
