"""Text from an encoder-decoder: a source is read once, and its output written from it. No HTTP and no Ray here.

Read in this order: `request.py` (what is asked for and what comes back), `session.py` (the two graphs), `search.py` (greedy and beam, of
one source), `batch.py` (the rows of many searches in one step), `waiting.py` (whose turn is next, and who would wait too long), `engine.py`
(who joins and leaves between two steps), `selftest.py` and `model.py` (a served encoder-decoder). Runs, deltas and the making of text are
those of `service/generation/`.
"""
