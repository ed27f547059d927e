"""Decoders: `model.py`."""
