"""Folders become models: `published.py` by `families/` (how each names its parts) and `weights.py`; `encoder.py` and `decoder.py` our own
kinds of folders, with `own.py`; `description.py` an encoder from a file that describes it.
"""
