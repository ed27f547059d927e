"""The one error of this room."""


class ExportError(ValueError):
    """No bundle was written. The message names what is wrong, the figure and its limit, and the next step."""
