"""Encoders: `model.py` (Transformer encoders), `softmax.py` (their softmax form), `gau_alpha.py` (an encoder built from gated attention
units only), `pooling.py` (one vector per text from its token vectors), `retrieval.py` (heads for sparse vectors),
`pipeline.py` (the modules of a sentence-transformers folder), `heads.py` (the served models: an encoder with pooling or a classifier),
`static.py` (a table of token vectors and their mean).
"""
