"""Decoders on a GPU: `session.py` (the step graph, with states in GPU memory), `row_copies.py` (copies of the states' rows on the
device) and `sampling.py` (the graph for GPUs, which draws the next tokens).
"""
