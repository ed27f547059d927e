"""Attention inside a gated feed-forward unit: GAU in `gau.py` and `causal_gau.py`, FLASH in `flash.py` and `causal_flash.py`."""
