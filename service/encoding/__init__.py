"""Computes vectors and scores with encoders. No file here imports HTTP libraries or Ray.

Read in this order: `request.py` (a request and its answer), `pending.py` (a request that waits for its results, and its deadline),
`batching.py` (chooses the inputs of a run), `queue.py` (the queue, with admission), `cache.py` (vectors already computed), `gpu/` (runs on
a GPU), `engine.py` (the threads that empty the queue), `selftest.py` (golden vectors, and the speed of this machine), `vectors.py` (the
number formats of a vector), `sparse.py` (sparse vectors), `token_matrix.py` (one vector per token), `token_pooling.py` (fewer of them),
`maps.py` (attention weights of one text), `space.py` (which vectors can be compared), `chunks.py` (vectors of parts of a text),
`model.py` (a served encoder).
"""
