"""Encoders: `model.py` (Transformer encoders), `gau_alpha.py` (built from gated attention units only), `pooling.py` and
`pipeline.py` (from token vectors to one vector per text), `heads.py` (the served models: an encoder with pooling or a
classifier).
"""
