"""Self-attention layers with other weights than the softmax of the scaled dot product. A query sees every key, or every past key.

`scored.py` has the base classes of the layers in `dot.py` and `causal_dot.py`, `cosine.py` and `causal_cosine.py`, `additive.py` and
`causal_additive.py`, `softmax1.py` and `causal_softmax1.py`, `nadaraya_watson.py` and `causal_nadaraya_watson.py`, `differential.py` and
`causal_differential.py`; causal forms are for decoders. `gated_softmax.py` is for decoders only. In `synthesizer.py` and
`causal_synthesizer.py`, with `synthesizer_scores.py`, scores are computed without comparing pairs of tokens.
In `disentangled.py` the scores also depend on the distance. `convolution_as_attention.py` shows that attention can compute any convolution.
"""
