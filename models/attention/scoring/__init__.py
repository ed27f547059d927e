"""How well a query matches a key, with every key seen.

Read `scored.py` first, and `causal_scored.py`, its form for decoders. They are the base of
`dot.py` and `causal_dot.py`, `cosine.py` and `causal_cosine.py`, `additive.py` and `causal_additive.py`, `softmax1.py` and
`causal_softmax1.py`, `nadaraya_watson.py` and `causal_nadaraya_watson.py`, `differential.py` and `causal_differential.py`.
`gated_softmax.py` is for decoders only. `synthesizer.py` and `causal_synthesizer.py`, with `synthesizer_scores.py`, have scores without
pairs. `convolution_as_attention.py` is a function alone.
"""
