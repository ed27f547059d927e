"""How a decoder of ours is trained. In the order of a run: `licences.py` and `sources.py` (which text may be used), `collect.py`
(the command that gathers it into a folder) or `pictures/` (which gathers pictures, written as text), `tokenizer.py`, `corpus.py` (the
folder: texts, then tokens), `config.py`, `packing.py` (which tokens a step sees), `optimisation.py`, `loop.py` with `checkpoints.py`,
`evaluation.py` (bits per byte), `plot.py`, `display.py`, `card.py` with `samples.py`, `run.py` (all of it, from a config to a folder that
can be exported) and `compare.py` (several runs side by side). `number_words/` trains encoder-decoders; `commands.py` has the
commands of both.
"""
