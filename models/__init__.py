"""What each attention layer computes, in torch, and the models built from them. Read the layers below in their order; then for encoders
`positions.py`, `feedforward.py`, `encoder.py` (the blocks), `pooling.py` and `heads.py` (what is served), `families/` (how a published
checkpoint names its parts) and `checkpoint.py` (a folder becomes a model); and for decoders `decoder.py` and `decoder_checkpoint.py`.
Nothing here knows of ONNX or HTTP.

Letters: B batch, H heads, H_k heads of keys where they are fewer, N length in tokens (N_q, N_k when they differ), C chunk length, K tokens
of a short convolution, L labels, M wanted positions, V vocabulary. Widths: D model, D_k, D_v heads of keys and values, D_φ feature map, D_c
channels of a convolution, D_kv memory. S (D_k, D_v) is the state of a recurrence, z (D_k,) its normaliser. Layout is (B, H, N, D_k) inside
a mechanism and (B, N, D) between layers. A key mask (B, N) is boolean: True = attend.
"""

from models.attention.based import BasedAttention
from models.attention.causal_linear import CausalLinearAttention
from models.attention.causal_softmax import CausalSoftmaxAttention
from models.attention.delta import DeltaNet
from models.attention.gated_delta import GatedDeltaNet
from models.attention.gated_linear import GatedLinearAttention
from models.attention.gated_softmax import GatedSoftmaxAttention
from models.attention.hedgehog import HedgehogAttention
from models.attention.linear import LinearAttention
from models.attention.multi_head import SoftmaxAttention
from models.attention.narrow import NarrowAttention
from models.attention.retention import Retention
from models.attention.sliding_window import SlidingWindowAttention
from models.attention.wide import WideAttention

LAYERS = {
    # Encoders: a token sees past and future.
    "softmax": SoftmaxAttention,
    "narrow": NarrowAttention,
    "wide": WideAttention,
    "linear": LinearAttention,
    # Decoders: a token sees its past, which is a state.
    "causal_softmax": CausalSoftmaxAttention,
    "gated_softmax": GatedSoftmaxAttention,
    "sliding_window": SlidingWindowAttention,
    "causal_linear": CausalLinearAttention,
    "hedgehog": HedgehogAttention,
    "based": BasedAttention,
    "retention": Retention,
    "gated_linear": GatedLinearAttention,
    "delta": DeltaNet,
    "gated_delta": GatedDeltaNet,
}
