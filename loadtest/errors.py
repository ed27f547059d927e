"""What stops a measurement; the message has the next step."""

from service.errors import AttnserveError


class LoadtestError(AttnserveError):
    """A sentence for the user."""
