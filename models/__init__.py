"""Attention layers in torch, and the models that are built from them. No file here imports ONNX or HTTP libraries.

A folder imports only from folders before it in this list: `parts/`, `attention/`, `layers.py` (the table of them), `folders/`,
`encoder/`, `decoder/`, `reformer/`, `checkpoints/` (loads folders as models), `encoder_decoder/`, `maps/`, `training/`.
`configs/` and `pretrained/` are data.

Letters: B batch, H heads, H_k heads of keys where they are fewer, N length in tokens (N_q, N_k when they differ, N_max the largest), C
chunk length, K tokens of a short convolution, L labels, M wanted positions, N_l landmarks, V vocabulary, Z codes of a codebook, A hidden
units of a score, P modalities, R rounds of hashing. Widths: D model, D_k, D_v heads of keys and values, D_φ feature map, D_r random
projections, D_h hidden layer, D_c channels of a convolution, D_kv memory. S (D_k, D_v) is the state of a recurrence, z (D_k,) its
normaliser. Layout is (B, H, N, D_k) inside a mechanism and (B, N, D) between layers. A key mask (B, N) is boolean: True = attend.
"""
