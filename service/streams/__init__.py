"""Streams of tokens that a client can continue after it lost its connection, its gateway or the whole service.

A token is a function of the request and of the tokens before it. So the events of a stream need not be stored: the request is stored when
the stream begins, and the tokens that a client did not receive are computed again. Read in this order: `position.py` (how much of a stream
a client has received, as the id of an event), `record.py` (the stored data of a run), `lease.py` (the right of one process to send a run;
stored responses have it too), `source.py` (the tokens of a run from its beginning, or from the position at which the client stopped).
"""
