"""The maximum sizes of messages between a gateway and a replica.

This module imports nothing, because `deployment/flags.py` imports it before Ray is imported.
"""

MESSAGE_BYTES = 32 * 1024 * 1024  # larger messages are rejected unread
PART_BYTES = 8 * 1024 * 1024  # array bytes per message, with ample room for its other fields; larger arrays are sent in pieces
ASKED_BYTES = MESSAGE_BYTES - 1024 * 1024  # largest request for text, which is sent in one message
