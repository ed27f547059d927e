"""What each attention layer computes, in torch, and the encoder models built from them. Read the layers below in
their order, then `positions.py`, `feedforward.py`, `encoder.py` (the blocks), `pooling.py` and `heads.py` (what is
served), `families/` (how a published checkpoint names its parts) and `checkpoint.py` (a folder becomes a model).
Nothing here knows of ONNX or HTTP.

Letters: B batch, H heads, N length in tokens (N_q, N_k when they differ), D model width, D_k, D_v head widths of keys
and values, D_kv width of a memory, L labels, V vocabulary. Layout is (B, H, N, D_k) inside a mechanism and (B, N, D)
between layers. A key mask (B, N) is boolean: True = attend.
"""

from models.attention.linear import LinearAttention
from models.attention.multi_head import SoftmaxAttention
from models.attention.narrow import NarrowAttention
from models.attention.wide import WideAttention

LAYERS = {
    "softmax": SoftmaxAttention,
    "narrow": NarrowAttention,
    "wide": WideAttention,
    "linear": LinearAttention,
}
