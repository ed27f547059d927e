"""Finds the stored ancestor and the tokens from which a state at an earlier position can be computed."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest
from service.states.record import Ancestor, StateRecord


class Replay(NamedTuple):
    """The instructions for computing a state: feed the tokens `ids` to the state `begin`, or to the empty state if `begin` is None."""

    begin: StateRecord | None
    ids: tuple[int, ...]


def beginnings(line: Sequence[Ancestor]) -> list[Ancestor]:
    """Return the states of a lineage with whose tokens the first state begins. The others are states from which it was rewound: they are
    at later positions."""
    reached = accumulate((each.record.position for each in line), min)
    return [each for each, position in zip(line, reached, strict=True) if each.record.position == position]


def replay_to(position: int, line: Sequence[Ancestor], now: float, param: str) -> Replay:
    """Return how to compute the state at `position` from the nearest ancestor that is still stored.

    `line`: the `beginnings` of a state's lineage. Raises InvalidRequest if some of the tokens to feed are unknown, such
    as the tokens before an uploaded state.
    """
    kept = [each.record for each in line if _is_kept(each.record, now) and each.record.position <= position]
    begin = max(kept, key=lambda record: record.position, default=None)
    first = 0 if begin is None else begin.position
    pieces: list[NDArray[np.int32]] = []
    end = position  # the tokens from here to `position` are in `pieces`
    for ancestor in line:
        ids = np.frombuffer(ancestor.ids, "<i4")
        at = ancestor.record.position - len(ids)  # the position before the first of these tokens
        if at < end <= ancestor.record.position and end > first:
            start = max(at, first)
            pieces.append(ids[start - at : end - at])
            end = start
    if end > first:
        raise InvalidRequest(
            f"no state is kept at position {position} or before from which its tokens are known: those before {end} are not", param=param
        )
    return Replay(begin, tuple(int(token) for piece in reversed(pieces) for token in piece))


def _is_kept(record: StateRecord, now: float) -> bool:
    return record.status == "ready" and (record.expires is None or record.expires > now)
