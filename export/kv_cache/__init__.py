"""A softmax decoder with a KV cache, for benchmarks: decoders with states of constant size are compared with it.

- `graph.py`: the ONNX graph, `python -m export.kv_cache.graph CHECKPOINT OUT`.
- `session.py`: runs the graph with preallocated caches.
"""
