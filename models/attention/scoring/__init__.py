"""How well a query matches a key, with every key seen: `dot.py`, `cosine.py`, `additive.py`, `nadaraya_watson.py`, `softmax1.py`, over
`scored.py` and, for decoders, `causal_scored.py`; `causal_softmax.py` and `gated_softmax.py`; `synthesizer.py` with
`synthesizer_scores.py` and `causal_synthesizer.py` (scores without pairs); `convolution_as_attention.py`.
"""
