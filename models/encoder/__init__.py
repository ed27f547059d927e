"""Encoders: `model.py` (the blocks), `gau_alpha.py` (of gated units alone), `pooling.py` and `pipeline.py` (one vector of a text),
`heads.py` (encoders with pooling or a classifier, as they are served).
"""
