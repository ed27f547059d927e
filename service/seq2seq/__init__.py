"""Text from an encoder-decoder: a source is read once, and its outputs are written from it. No HTTP and no Ray here.

Read in this order: `request.py` (a request), `session.py` (the two graphs), `search.py` (greedy and beam search for one source), `batch.py`
(the rows of many searches in one step), `admission.py` (how long a source waits for its rows), `engine.py` (the step) and `selftest.py`.
Runs, their text, the queue, the life of an engine and the served model are those of `service/generation/`.
"""
