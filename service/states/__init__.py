"""States that users own: recurrent states with an id, kept until they are deleted or expire; and documents, small rows of JSON beside them.

Reading order: `record.py` (the stored data), `engine.py` (the interface of a store), `refusals.py` (its errors), `sqlite.py` (the store in
one directory, or in memory), `sqlite_schema.py` and `sqlite_documents.py` (its tables), `blob_files.py` (its files), `redis.py` (the store
in Redis), `redis_states.lua` and `redis_documents.lua` (its script), `store.py` (a store on its own thread, for callers on an event loop),
`opening.py` (opens the store that the settings name), `commands.py` (checks the stored bytes), `validity.py` (checks that tensors are a
state of a model), `blob.py` (the portable form of one state), `numerics.py` (identifies the arithmetic that computes states).
"""
