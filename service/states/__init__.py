"""Stores states and documents of users. A state is a recurrent state with an id, stored until it is deleted or expires. A document is a
small row of JSON.

Read in this order: `record.py` (the stored data), `engine.py` (what a store does), `rows.py` (a transaction), `refusals.py` (its errors),
`backend.py` (what SQLite and Redis must do for it), `sqlite.py` (the store in one directory, or in memory), `sqlite_schema.py` (its
tables), `sqlite_disk.py` (its disk may be full, its files lost or damaged), `blob_files.py` (its files), `redis.py` (the store in Redis),
`redis_client.py` (its connection), `redis.lua` (its script), `store.py` (a store on its own thread, for callers on an event
loop), `opening.py` (opens the store that the settings name), `commands.py` (the commands `attnserve states`), `backup.py` (copies a store
that is in use), `rebuilding.py` (rebuilds a damaged index), `validity.py` (checks that tensors are a state of a model), `blob.py` (the
portable form of one state), `numerics.py` (identifies the arithmetic that computes states).
"""
