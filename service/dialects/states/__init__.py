"""The routes `/v1/states` of recurrent states, and the fields with which completions, chat and responses continue and store states.

Read in this order: `options.py` (these fields), `schemas.py` (the bodies and answers of `/v1/states`), `finding.py` (ids, names, versions
and idempotency keys), `records.py` (the record of a new state, and its JSON), `routes.py` (read, change, delete, fork), `making.py` (states
that a model computes) and `blobs.py` (the bytes of a state).
"""
