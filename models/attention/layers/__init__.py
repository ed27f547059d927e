"""What mechanisms share, and standard attention.

Read in this order: `capabilities.py` (what a layer can do, as data) and `mechanism.py` (the base of all layers: every fact about one),
`scaled_dot_product.py`, `multi_head.py`, `encoder.py` (bases), `softmax.py` (the standard layer), `narrow.py` and `wide.py` (heads of
other widths), `fused_block.py` (with the norm in front), `cross.py` and `fusion.py` (queries from elsewhere); for decoders `causal.py` (the
promise of every causal layer), `causal_scored.py` (any score over a cache), `causal_softmax.py`, `recurrence.py` (a past of constant size),
`running_max.py`, `short_convolution.py`, `head_norm.py`.
"""
