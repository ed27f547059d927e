"""The Reformer: `reversible.py` (blocks whose inputs need not be kept), `model.py`."""
