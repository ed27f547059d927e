"""Parts of blocks beside attention: `positions.py`, `xpos.py`, `feedforward.py`, `scale_norm.py`, `modules.py`, `checks.py`."""
