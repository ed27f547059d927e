"""Decoders: `model.py`, `window.py` (a window, alone or with feature maps, in the place of full attention)."""
