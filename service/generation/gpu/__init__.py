"""Decoders on a GPU: `session.py` (the step graph, with states in GPU memory) and `row_copies.py` (copies of the states' rows on the
device).
"""
