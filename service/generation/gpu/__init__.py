"""Decoders on a GPU: `session.py` (the step graph, with states in GPU memory) and `row_copies.py` (copies between rows there)."""
