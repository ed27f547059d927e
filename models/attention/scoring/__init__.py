"""Self-attention layers with other weights than the softmax of the scaled dot product. A query sees every key, or every past key.

`scored.py` has the base class of the layers in `dot.py`, `cosine.py`, `additive.py`, `softmax1.py`, `nadaraya_watson.py` and
`differential.py`, which also have a causal form for decoders. `gated_softmax.py` is for decoders only. In `synthesizer.py` and
`causal_synthesizer.py`, with `synthesizer_scores.py`, scores are computed without comparing pairs of tokens.
In `disentangled.py` the scores also depend on the distance. `convolution_as_attention.py` shows that attention can compute any convolution.
"""
