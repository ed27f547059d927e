"""A decoder with softmax attention (the teacher) becomes one with a window and feature maps (the student), in two phases (LoLCATs).

`config.py` has the configs of both, `teacher.py` loads the teacher, `delta.py` saves the student as its difference to the teacher.
Attention transfer: `sequences.py` has the texts, `transfer.py` the loss, `task.py` the task that `models/training/trainer.py` runs, with
its command. Tuning: `tokens.py` writes the texts as tokens, `layers.py` ranks layers for a longer window, `parallel.py` has the forward
pass over whole texts, `low_rank.py` the changes of projections, `next_token.py` the loss, `tuning.py` the task with its command.
`evaluation.py` measures student and teacher, `card.py` writes the model card.
"""
