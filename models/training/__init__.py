"""Trains models. A task (`task.py`) defines a model, a loss, an evaluation and a result. The other files serve all tasks:

`config.py` (the YAML file of a run), `optimisation.py` (parameters, AdamW, learning rate), `trainer.py` (the loop), `checkpoints.py`
(saves and resumes a run), `display.py` (progress bar), `run.py` (the output folder), `cards.py` (the template of model
cards), `curves.py` (pictures of curves).

Tasks: `text/`, `pictures/`, `number_words/` and `distillation/`. `start.py` starts the first three, `__main__.py` has the commands.

Training text: `licences.py` (which installed packages may be used), `sources.py` (reads their files), `collect.py` (writes these texts to a
data folder), `tokenizer.py`, `corpus.py` (the data folder: texts and tokens).
"""
