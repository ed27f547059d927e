"""The error that stops a measurement. Its message says what the user can do about it."""

from service.errors import AttnserveError


class LoadtestError(AttnserveError):
    """A measurement cannot be made, or its result is not valid."""
