"""Attention mechanisms, one per file: first pure functions on q, k, v (B, H, N, D_k), then the layer with its projections.

`layers/` has shared parts and standard attention, `scoring/` other scores of query and key, `sparse/` patterns in which a query sees
some of the keys, `recurrent/` decoders with a state of constant size, `linear/` replacements of the softmax at linear cost, `gated/`
attention inside a gated unit. The causal form of a layer, for decoders, is `causal_*.py` beside it.
"""
