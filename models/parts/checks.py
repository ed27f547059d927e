"""Checks of options: a ValueError names the option and its value."""

from collections.abc import Iterable


def at_least(name: str, value: int, least: int, why: str) -> int:
    """`value`, or ValueError."""
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}: {why}")
    return value


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError for a value that is not one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
