"""States that outlive their run: `packing.py` (the bytes of a state), `writer.py` (writes that nobody waits for), `keeper.py` (loads and
stores states and checkpoints), `prefix_cache.py` (states in memory, found by the tokens that were fed to them), `shared_prefixes.py`
(states in the store, found in the same way), `prefixes.py` (lets runs begin at states from the cache or the store).
"""
