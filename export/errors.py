"""The one error of this room."""

from service.errors import AttnserveError


class ExportError(AttnserveError, ValueError):
    """No bundle was written. The message names what is wrong, the figure and its limit, and the next step."""
