"""How the encoder-decoders of number words are trained. In the order of a run: `words.py` (numbers, how eight languages say them, and which
are held out), `tokens.py`, `config.py`, `batches.py`, `loop.py`, `evaluation.py` (exact matches), `pictures.py`, `display.py`, `card.py`
and `run.py` (all of it). What any training needs is a folder above: `config.py`, `optimisation.py`, `checkpoints.py`."""
