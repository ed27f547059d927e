"""The Reformer: `model.py`."""
