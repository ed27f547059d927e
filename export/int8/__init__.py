"""Int8 graphs for CPUs.

- `recipes.py`: the ways of quantising a graph.
- `choice.py`: tries every recipe on an encoder and keeps the fastest that is accurate enough.
"""
