"""The training of a decoder of text: `packing.py` (token batches), `evaluation.py` (bits per byte), `samples.py` (sampled texts),
`card.py` (model card) and `task.py`, which combines them.
"""
