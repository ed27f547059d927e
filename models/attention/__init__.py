"""Attention mechanisms, one in each file: first pure functions of q, k and v (B, H, N, D_k), then the layer with its projections.

`layers/`     standard attention, and the parts that several mechanisms share
`scoring/`    attention with other weights than the softmax of the scaled dot product
`sparse/`     attention in which a query sees only some of the keys
`linear/`     attention in which the softmax is replaced, so that the cost is linear in N
`recurrent/`  decoder layers whose state is a matrix of constant size that decays or is overwritten
`gated/`      attention inside a gated feed-forward unit
For most encoder layers x.py there is a causal form for decoders, causal_x.py in the same folder.
"""
