"""Decoders: `model.py`, `window.py` (a window in the place of full attention)."""
