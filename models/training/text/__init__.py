"""The task of a decoder that continues text: `packing.py` (the tokens of a step), `evaluation.py` (bits per byte), `samples.py` (texts it
writes), `plot.py` (curves), `card.py` (model card) and `task.py` (all of them together).
"""
