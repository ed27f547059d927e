"""Attention transfer from a decoder with softmax attention (the teacher) to one with a window and feature maps (the student).

`config.py` has the config, `sequences.py` the texts, `teacher.py` loads the teacher, `transfer.py` has the loss, `delta.py` saves the
student as its difference to the teacher, `task.py` is the task that `models/training/trainer.py` runs, with its command. `evaluation.py`
measures student and teacher, and `card.py` writes the model card.
"""
