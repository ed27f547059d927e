"""Distillation of an encoder with softmax attention (the teacher) into one with another attention (the student).

`pieces.py` cuts the collected texts, `config.py` has the config, `batches.py` the batches, `student.py` builds
the student, `objectives.py` has the losses, `evaluation.py` compares student and teacher, `task.py` is the task that the trainer runs,
`delta.py` saves the student as its difference to the teacher, and `decoder_delta.py` rebuilds a decoder from such a difference.
"""
