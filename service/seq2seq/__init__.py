"""Text from an encoder-decoder: a source is read once, and its output written from it. No HTTP and no Ray here.

Read in this order: `request.py` (request and result), `session.py` (the two graphs), `search.py` (greedy and beam, of one source),
`batch.py` (the rows of many searches in one step), `waiting.py` (the order of waiting requests, and their limits), `engine.py` (the loop:
searches join and leave between two steps), `selftest.py` and `model.py` (a served encoder-decoder). Runs, deltas and the making of text are
those of `service/generation/`.
"""
