"""What mechanisms share.

Read in this order: `capabilities.py` (what a layer can do, as data), `scaled_dot_product.py`, `multi_head.py`, `narrow.py` and `wide.py`
(heads of other widths), `fused_block.py` (with the norm in front), `cross.py` and `fusion.py` (queries from elsewhere); for decoders
`causal.py` (the promise of every causal layer), `recurrence.py` (a past of constant size), `running_max.py`, `short_convolution.py`,
`head_norm.py`.
"""
