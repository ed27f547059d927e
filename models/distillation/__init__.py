"""Distillation: an encoder gets another attention and learns to embed as its softmax teacher does. In the order of a run: `pieces.py` and
`collect.py` (texts), `config.py`, `batches.py`, `student.py` (the teacher with another attention), `objectives.py` (losses),
`evaluation.py` (likeness), `task.py` (the task of `models/training/trainer.py`), `delta.py` (the saved difference to the teacher),
`plot.py`, `card.py`, `commands.py` (the command); and `trials.py`, which compares feature maps.
"""
