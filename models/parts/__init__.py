"""What blocks are built of, besides attention: `positions.py`, `xpos.py`, `feedforward.py`, `scale_norm.py`, `modules.py`."""
