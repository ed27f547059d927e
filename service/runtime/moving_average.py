"""A moving average of recent measurements."""

_MEMORY = 0.9  # weight of the previous average; the new value's weight is 1 - _MEMORY


def averaged(average: float, value: float) -> float:
    """Return the moving average after one more value. An average of 0 means that there was no value before."""
    return value if not average else _MEMORY * average + (1 - _MEMORY) * value
