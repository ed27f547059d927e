"""Loads checkpoint folders as models. `published.py` loads published encoders, with `families/` (their settings and tensor names) and
`weights.py`. `own_encoder.py` and `decoder.py` load and save the folders that training writes, with `own.py`. `description.py` builds an
encoder from a file that describes it.
"""
