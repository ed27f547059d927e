"""Streams of tokens that a client can continue after it lost its connection, its gateway or the whole service.

A token is a function of the request and of the tokens before it, so a stream needs no log: the request is stored when the stream begins,
and whatever a client did not receive is computed again. In reading order: `position.py` (what a client has received, as the id of an
event), `record.py` (what the store keeps of a run), `lease.py` (who may send a run now), `source.py` (a run from its beginning, or from
where a client stopped).
"""
