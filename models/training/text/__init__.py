"""The training of a decoder of text: `packing.py` (token batches), `evaluation.py` (bits per byte) and `task.py`, which combines them."""
