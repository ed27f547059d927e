"""Reads checkpoint folders: `folder.py` (settings and weights), `config_fields.py` (types and bounds of the settings),
`byte_tokenizer.py` (a tokenizer that needs no file).
"""
