"""Vectors and scores from an encoder. No HTTP and no Ray here.

Read in this order: `request.py` (what is asked and answered), `batching.py` (which inputs share a run), `queue.py` (with admission before
it), `cache.py` (vectors already computed), `engine.py` (the threads that empty the queue), `selftest.py` (golden vectors, and the rate of
this machine), `vectors.py` (the number formats of a vector), `maps.py` (attention weights of one text), `model.py` (a served encoder).
"""
