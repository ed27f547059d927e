"""One mechanism a file: pure functions on q, k, v of (B, H, N, D_k) first, then the layer with its projections.

`layers/` has what they share, `scoring/` how well a query matches a key, `sparse/` which keys a query sees, `recurrent/` a past of constant
size, `linear/` softmax replaced by something of linear cost, `gated/` attention inside a gated unit. A layer for decoders stands beside its
other form, as `causal_*.py`.
"""
