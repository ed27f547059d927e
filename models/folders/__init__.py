"""Reads folders of settings and weights: `folder.py`, `config_fields.py` (types and bounds of settings), `byte_tokenizer.py`."""
