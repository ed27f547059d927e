"""The exception that exports raise."""

from service.errors import AttnserveError


class ExportError(AttnserveError, ValueError):
    """The export failed and no bundle was written. The message states the problem, the figure and its limit, and the next step."""
