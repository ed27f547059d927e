"""Generates text with encoder-decoders: a source text is encoded once, then its outputs are generated. No file here imports HTTP libraries
or Ray.

Read in this order: `request.py` (a request), `session.py` (the two graphs, and their test before a bundle is served), `search.py` (greedy
and beam search for one source), `batch.py` (the rows of many searches in one step) and `engine.py` (how long a source waits for its
rows, and the step loop). `service/generation/` contains the shared parts: runs, their text, the queue, the base class of engines,
and the served model."""
