"""A moving average of recent measurements."""

_MEMORY = 0.9  # weight of the past


def averaged(average: float, value: float) -> float:
    """The average with one more value. An average of 0 has no values yet."""
    return value if not average else _MEMORY * average + (1 - _MEMORY) * value
