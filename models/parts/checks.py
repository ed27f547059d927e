"""Checks the options of layers. An error names the option and its value."""

from collections.abc import Iterable


def at_least(name: str, value: int, least: int, why: str) -> int:
    """Return `value`. Raises ValueError, with the reason `why`, if it is below `least`."""
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}: {why}")
    return value


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if the value is not one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
