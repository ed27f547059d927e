"""Attention with sparse patterns, in which a query sees some of the keys. `windows.py`, `blocks.py` and `pattern_cache.py` are shared.

`local.py`, `sliding_window.py`; `atrous.py` and `causal_atrous.py`; `sparse.py` and `causal_sparse.py` (strided and fixed);
`longformer.py` and `causal_longformer.py`; `bigbird.py` and `bigbird_etc.py`; `lsh.py` and `causal_lsh.py` with `lsh_buckets.py` and
`lsh_chunks.py`.
"""
