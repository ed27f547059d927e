"""Reading a folder of settings and weights: `folder.py`, `config_fields.py` (types and bounds of what is read), `byte_tokenizer.py`."""
