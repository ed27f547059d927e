"""One mechanism a file: pure functions on q, k, v of (B, H, N, D_k) first, the layer that projects to heads and back below them."""
