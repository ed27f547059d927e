"""The routes `/v1/states` of recurrent states, and the fields with which completions, chat and responses continue and store states.

Read in this order: `options.py` (these fields), `schemas.py` (the bodies and answers of `/v1/states`), `finding.py` (ids, names, versions
and idempotency keys), `keeping.py` (the record of a new state), `answers.py`, `routes.py` (read, change, delete, fork), `making.py` (states
that a model computes), `replay.py` (the tokens from which a state at an earlier position is computed) and `blobs.py` (the bytes of a
state)."""
