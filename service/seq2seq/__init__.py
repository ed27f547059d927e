"""Text from an encoder-decoder: a source is read once, and its outputs are written from it. No HTTP and no Ray here.

Read in this order: `request.py` (a request), `session.py` (the two graphs), `search.py` (greedy and beam search for one source), `batch.py`
(the rows of many searches in one step), `admission.py` (how long a source waits for its rows), `engine.py` (the step), `selftest.py` and
`model.py` (a served encoder-decoder). Runs, their text, the queue and the life of an engine are those of `service/generation/`.
"""
