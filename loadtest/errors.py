"""The error that stops a measurement. Its message names the next step."""

from service.errors import AttnserveError


class LoadtestError(AttnserveError):
    """A measurement cannot be made, or its result is not valid."""
