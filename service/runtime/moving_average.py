"""How long things have taken lately."""

_MEMORY = 0.9  # weight of the past


def averaged(past: float, now: float) -> float:
    """A moving average; 0 for the past means there is none."""
    return now if not past else _MEMORY * past + (1 - _MEMORY) * now
