"""Bytes to requests, and answers to bytes, the same for every dialect.

Read in this order: `connections.py` (the server), `edge.py` (around every request), `keys.py` and `tenants.py` (who asks),
`content_encoding.py` (the body), `routing.py` (one route), `fields.py` (rules for every body), `dialect.py` (what a dialect is),
`answers.py`, `sse.py` and `ndjson.py` (three forms of an answer), `cors.py`, `openapi.py`.
"""
