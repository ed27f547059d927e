"""Self-attention layers with other weights than the softmax of the scaled dot product. A query sees every key, or every past key.

`scored.py` has the base classes of the layers in `dot.py`, `cosine.py`, `additive.py`, `softmax1.py`, `nadaraya_watson.py` and
`differential.py`. The decoder form of each x.py is in causal_x.py. `gated_softmax.py` is for decoders only. In `synthesizer.py` and
`causal_synthesizer.py`, with `synthesizer_scores.py`, scores are computed without comparing pairs of tokens.
`convolution_as_attention.py` shows that attention can compute any convolution.
"""
