"""A trained encoder's attention is replaced, and the new one taught to do what the old one did: `attnserve distill`.

Read `pieces.py` and `collect.py` (the texts), `batches.py` (what a step sees), `student.py` (the teacher with other attention and more
positions), `objectives.py` (what is asked of it, in two phases), `evaluation.py` (how like its teacher it is), `loop.py` and `run.py` (the
run), `delta.py` (what is kept: the difference to the teacher) and `card.py`; `plan.py` what a run is, `display.py` how it shows.
`trials.py` compares feature maps on equal terms; `commands.py` is the command.
"""
