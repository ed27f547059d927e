"""How large a message between a gateway and a replica may be. Imported where Ray's flags are set, so it imports nothing."""

MESSAGE_BYTES = 32 * 1024 * 1024  # a process refuses larger ones before it reads them
PART_BYTES = 8 * 1024 * 1024  # numbers in one message; what is larger goes in several, so one fits with all that is around its numbers
ASKED_BYTES = MESSAGE_BYTES - 1024 * 1024  # a request for text, which goes in one message
