"""States that outlive their run: `keeper.py` (states and checkpoints, to and from the store), `prefix_cache.py` (states in memory, found by
the tokens that led to them).
"""
