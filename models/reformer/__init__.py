"""The Reformer: `model.py` is the model, `reversible.py` has blocks whose inputs need not be stored for the backward pass."""
