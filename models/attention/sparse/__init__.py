"""Attention with sparse patterns, in which a query sees only some of the keys.

Encoder layers, each with its decoder form in parentheses: `local.py` (`sliding_window.py`), `atrous.py` (`causal_atrous.py`), `sparse.py`
(`causal_sparse.py`), `longformer.py` (`causal_longformer.py`), `lsh.py` (`causal_lsh.py`). `bigbird.py` and `bigbird_etc.py` are for
encoders only, `sink_window.py` (a window and the first tokens) for decoders only. `lsh_buckets.py` and `lsh_chunks.py` are parts of LSH
attention. Several layers use `blocks.py`, `windows.py` and `pattern_cache.py`.
"""
