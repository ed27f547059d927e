"""Vectors and scores from an encoder. No HTTP and no Ray here.

Read in this order: `batching.py` (which inputs share a call), `queue.py` (with admission before it), `cache.py` (vectors already known),
`engine.py` (the queue, and the threads that empty it), `selftest.py` (golden vectors, and the rate of this machine), `vectors.py` (the
forms a vector is sent in), `maps.py` (attention weights of one text).
"""
