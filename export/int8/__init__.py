"""Int8 graphs for CPUs.

- `recipes.py`: the recipe for quantising a graph, with two ranges of the weights.
- `choice.py`: tries both on an encoder and keeps the fastest that is accurate enough.
"""
