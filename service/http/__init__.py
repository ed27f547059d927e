"""The HTTP layer that all dialects share: it reads requests from connections and writes answers.

The modules in reading order: `connections.py` (the server), `gate.py` (steps before and after every request), `edge.py` (requests by
ASGI), `direct.py` (plain requests without it), `interrupts.py` (ends the work on a request early), `keys.py`, `tenants.py` and
`shared_limits.py` (API keys and their limits), `content_encoding.py` (compressed bodies), `routing.py` (from a body to an answer),
`fields.py` (rules for the fields of every body), `dialect.py` (a dialect's paths and errors), `answers.py` (JSON), `sse.py` (server-sent
events), `ndjson.py` (one JSON object per line), `cors.py` (requests of other origins), `openapi.py`.
"""
