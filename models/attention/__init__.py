"""One mechanism a file: pure functions on q, k, v of (B, H, N, D_k) first, then the layer with its projections."""
