"""The HTTP layer that all dialects share: it reads requests from connections and writes answers.

The modules in reading order: `connections.py` (the server), `edge.py` (steps before and after every request), `keys.py` and
`tenants.py` (API keys and their limits), `content_encoding.py` (compressed bodies), `routing.py` (one route), `fields.py` (rules
for every body), `dialect.py` (a dialect's paths and errors), `answers.py`, `sse.py` and `ndjson.py` (answers as JSON, events and
lines), `cors.py`, `openapi.py`.
"""
