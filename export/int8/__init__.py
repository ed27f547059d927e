"""Int8 graphs for CPUs.

- `recipes.py`: the recipes for quantising a graph.
- `choice.py`: tries every recipe on an encoder and keeps the fastest that is accurate enough.
"""
