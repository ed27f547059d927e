"""Standard attention, and the parts that several mechanisms share.

Read in this order: `capabilities.py` (which features a layer supports) and `mechanism.py` (the base class of all layers, with the facts
about a mechanism), `scaled_dot_product.py`, `multi_head.py`, `encoder.py` (base classes of encoder layers), `softmax.py` (the standard
layer), `narrow.py` and `wide.py` (heads of other widths), `fused_block.py` (a norm and one projection for q, k, v), `cross.py` (queries
of another sequence) and `fusion.py` (a learned query). For decoders: `causal.py` (the interface of every causal layer),
`causal_scored.py` (any score, with a cache of keys and values), `head_norm.py`, `grouped_heads.py` (query heads that share keys),
`causal_softmax.py`, `recurrence.py` (a state of constant size), `running_max.py` (keeps causal sums of exponentials from overflowing),
`short_convolution.py`.
"""
