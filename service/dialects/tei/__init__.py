"""The dialect of text-embeddings-inference: `routes.py` with `schemas.py`, `info.py` and `tokens.py`."""
