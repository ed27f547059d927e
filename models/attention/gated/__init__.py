"""Attention inside a gated feed-forward unit: `gau.py` and `causal_gau.py`, `flash.py` and `causal_flash.py`."""
