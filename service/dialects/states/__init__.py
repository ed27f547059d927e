"""The routes of recurrent states, `/v1/states`, and the fields with which completions, chat and responses continue and store states.

Read in this order: `options.py` (these fields), `schemas.py` (the bodies and answers of `/v1/states`), `finding.py` (ids, names, versions
and idempotency keys), `keeping.py` (how a new state is kept), `answers.py`, `routes.py` (read, change, delete, fork), `making.py` (states
that a model computes), `replay.py` (which tokens lead back to an earlier position), `blobs.py` (the bytes of a state), `turns.py` (states
of generated texts).
"""
