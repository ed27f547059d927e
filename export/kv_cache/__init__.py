"""A softmax decoder with a KV cache. Benchmarks compare decoders with states of constant size with it.

- `graph.py`: the ONNX graph, `python -m export.kv_cache.graph CHECKPOINT OUT`.
- `session.py`: runs the graph with preallocated caches.
"""
