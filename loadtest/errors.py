"""What stops a measurement; the message has the next step."""


class LoadtestError(RuntimeError):
    """A sentence for the user."""
