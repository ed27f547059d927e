"""States that users own: recurrent states with an id, kept until they are deleted or expire; and documents, small rows of JSON beside them.

Reading order: `record.py` (what is kept), `engine.py` (what any store can do), `refusals.py` (their errors), `sqlite.py` (the store in one
directory, or in memory), `sqlite_schema.py` and `sqlite_documents.py` (its tables), `blob_files.py` (its files), `redis.py` (the store in
Redis), `redis_states.lua` and `redis_documents.lua` (its script), `store.py` (the same on a thread of its own, for callers on an event
loop), `opening.py` (the store that the settings name), `commands.py` (checks its bytes), `validity.py` (what makes tensors a state of a
model), `blob.py` (the portable form of one state), `numerics.py` (names the arithmetic that computes states).
"""
