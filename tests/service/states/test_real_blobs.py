"""States of a real decoder with a block of each layer: a blob continues to the bit, and no numbers in it reach the rows beside it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export import contract
from service.generation.session import OnnxStepSession, Tensor, beginning

BIG = float(np.finfo(np.float32).max)
FEW = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def bundle(constant_states_bundle: Path) -> Path:
    return constant_states_bundle


@cache
def opened(bundle: Path) -> OnnxStepSession:
    return OnnxStepSession(bundle, contract.read_manifest(bundle), threads=2)


def fed(session: OnnxStepSession, rows: Sequence[Sequence[Tensor]], ids: Sequence[int], position: int) -> list[tuple[list[Tensor], Tensor]]:
    """Feed the ids to each row, in one call. Returns the new states of each and its logits (V,)."""
    B = len(rows)
    states, out = session.states(B), session.states(B)
    for row, tensors in enumerate(rows):
        states.put(row, tensors)
    lengths = np.full(B, len(ids), np.int64)
    logits = session.run(np.array([ids] * B, np.int64), lengths, np.full(B, position, np.int64), lengths[:, None] - 1, states, out)
    return [(out.read(row, position + len(ids)), logits[row, 0]) for row in range(B)]


def test_the_manifest_names_the_numbers_that_are_divisors_or_counts(bundle: Path) -> None:
    holds = {spec.name: spec.holds for spec in opened(bundle).decoder.states if spec.holds is not None}
    column = "sums_in_last_column"
    assert holds == {
        **{"state_0_S": column, "state_1_n": "count", "state_2_S": column, "state_3_z": "sums", "state_4_S": column, "state_5_S": column},
        **{"state_11_n": "count", "state_12_n": "count"},
    }


@FEW
@given(st.data())
def test_no_finite_numbers_reach_the_rows_beside_them(bundle: Path, data: st.DataObject) -> None:
    """Not even such as `unpack` refuses: bundles of earlier exports do not name all that must be true."""
    session, ids, following = opened(bundle), [1, 2, 3], [7, 8, 9, 10]
    ((tensors, _),) = fed(session, [beginning(session.decoder)], ids, 0)
    extreme = st.sampled_from([BIG, -BIG, 1e30, -1e30, 1.5, 0.0, -7.0, 1e-45])
    hostile = [np.full_like(tensor, data.draw(extreme)) for tensor in tensors]
    (alone,) = fed(session, [tensors], following, len(ids))
    _, beside, _ = fed(session, [hostile, tensors, hostile], following, len(ids))
    assert np.array_equal(alone[1], beside[1])
    assert all(np.array_equal(*each) for each in zip(alone[0], beside[0], strict=True))
