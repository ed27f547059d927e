"""text-embeddings-inference: `routes.py`, its `schemas.py`, `info.py` and `tokens.py`."""
