"""The exception that exports raise."""

from service.errors import AttnserveError


class ExportError(AttnserveError, ValueError):
    """A command of this package failed, and no bundle was written or changed."""
