"""The error that stops a measurement. Its message says what to do next."""

from service.errors import AttnserveError


class LoadtestError(AttnserveError):
    """A measurement cannot be made, or its result is not valid."""
