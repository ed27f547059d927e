"""Self-attention layers in which the score of a query and a key is not the scaled dot product. Every query sees every key.

`scored.py` has the base class of the layers in
`dot.py` and `causal_dot.py`, `cosine.py` and `causal_cosine.py`, `additive.py` and `causal_additive.py`, `softmax1.py` and
`causal_softmax1.py`, `nadaraya_watson.py` and `causal_nadaraya_watson.py`, `differential.py` and `causal_differential.py`.
`gated_softmax.py` is for decoders only. `synthesizer.py` and `causal_synthesizer.py`, with `synthesizer_scores.py`, score without
comparing pairs of tokens. `convolution_as_attention.py` contains no layer of this kind.
"""
