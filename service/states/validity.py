"""Checks that tensors are a valid state of a model. The checks apply to runs that move between engines and to blobs that clients upload."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.errors import InvalidRequest, RuntimeFailed, ServiceError

AGAIN = "send the request without the state, or upload the state again, unchanged"


def check_bundle(found: str, fingerprint: str) -> None:
    """Raise InvalidRequest if `found`, the bundle of a state, is not the bundle `fingerprint`."""
    if found != fingerprint:
        raise InvalidRequest(
            f"the state is of the bundle with fingerprint {found[:12]!r} and this model's is {fingerprint[:12]!r}: "
            "continue it with the bundle that made it, or send the request again"
        )


def check_position(position: int, decoder: contract.Decoder, *, least: int = 0) -> None:
    """Raise InvalidRequest if the model cannot process a sequence of `position` tokens."""
    if position < least:
        raise InvalidRequest(f"the state is broken: its position is {position}, and the least is {least}; {AGAIN}")
    if decoder.n_positions is not None and position > decoder.n_positions:
        raise InvalidRequest(f"the state is not of this model: its position is {position}, and the most is {decoder.n_positions}; {AGAIN}")


def check_form(spec: contract.StateTensor, shape: tuple[int, ...], dtype: np.dtype[Any], position: int) -> None:
    """Raise InvalidRequest if a state tensor at `position`, given without the batch axis B, has another shape or dtype than in the
    manifest."""
    if shape != (expected := spec.shape_at(position)):
        raise InvalidRequest(f"the state is not of this model: {spec.name} has the shape {shape}, not {expected}; {AGAIN}")
    if dtype != np.dtype(spec.dtype):
        raise InvalidRequest(f"the state is not of this model: {spec.name} has the dtype {dtype}, not {spec.dtype}; {AGAIN}")


def check_numbers(spec: contract.StateTensor, tensor: NDArray[Any], position: int) -> None:
    """Raise InvalidRequest if a state tensor has numbers that no sequence of `position` tokens can give: numbers that are not finite, or
    that contradict `spec.holds`."""
    if not np.isfinite(tensor).all():
        raise InvalidRequest(f"the state is broken: {spec.name} has numbers that are not finite; {AGAIN}")
    if not position:
        return
    holds = spec.holds or ("sums" if spec.name.endswith("_z") else None)  # bundles of earlier exports have no `holds`, only the name
    if holds == "sums" and not (tensor > 0).all():
        raise InvalidRequest(f"the state is broken: {spec.name} has numbers that are not above 0; {AGAIN}")
    if holds == "sums_in_last_column":
        sums = tensor[..., -1]  # (H, D)
        if not ((sums >= 0).all() and (sums > 0).any(axis=-1).all()):
            raise InvalidRequest(f"the state is broken: the sums in the last column of {spec.name} are not above 0; {AGAIN}")
    if holds == "count" and not ((tensor >= 1) & (tensor <= position) & (tensor == np.floor(tensor))).all():
        raise InvalidRequest(f"the state is broken: {spec.name} counts other tokens than its position, {position}; {AGAIN}")


def not_finite(position: int, *, began: bool) -> ServiceError:
    """Return the error of a run whose numbers at `position` are not finite.

    `began`: the run began at a stored state. This state is at fault then, and not the service: a client may upload finite numbers that
    overflow when the model continues them.
    """
    found = f"the model's numbers at position {position} are not finite"
    if began:
        return InvalidRequest(f"{found}, so the state cannot be continued with this text: continue another state, or none", param="state")
    return RuntimeFailed(found)


def check_logits(name: str, logits: NDArray[np.float32], vocab_size: int) -> None:
    """Raise InvalidRequest if the array is not the logits of `vocab_size` tokens. A token that the model excludes has the logit -inf."""
    if not (logits.shape == (vocab_size,) and logits.dtype == np.float32):
        raise InvalidRequest(f"the state is not of this model: {name} has not {vocab_size} numbers in float32; {AGAIN}")
    if not np.isfinite(logits.max()):
        raise InvalidRequest(f"the state is broken: {name} has numbers that are not finite; {AGAIN}")
