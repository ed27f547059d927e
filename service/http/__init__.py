"""HTTP, the same for every dialect: from bytes to requests, and from answers to bytes.

Read in this order: `connections.py` (the server), `edge.py` (around every request), `keys.py` and `tenants.py` (API keys, their limits),
`content_encoding.py` (compressed bodies), `routing.py` (one route), `fields.py` (rules for every body), `dialect.py` (a dialect's paths and
errors), `answers.py`, `sse.py` and `ndjson.py` (JSON, events and lines), `cors.py`, `openapi.py`.
"""
