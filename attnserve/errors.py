"""The base class of all errors of this project."""


class AttnserveError(Exception):
    """An error whose message is a sentence for the user. The command line prints the message without a traceback."""
