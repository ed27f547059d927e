"""A softmax decoder with a KV cache, which decoders of constant state are benchmarked against.

- `graph.py`: the ONNX graph, `python -m export.kv_cache.graph CHECKPOINT OUT`.
- `session.py`: runs the graph with preallocated caches.
"""
