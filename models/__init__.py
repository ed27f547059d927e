"""What each attention layer computes, in torch, and the models built from them. Read the layers below in their order; then for encoders
`positions.py`, `xpos.py`, `feedforward.py`, `encoder.py` (the blocks), `gau_alpha.py` (an encoder of gated units), `pooling.py` and
`heads.py` (what is served), `families/` (how a published checkpoint names its parts), `checkpoint.py` (a folder becomes a model) and
`encoder_file.py` (a description becomes one); and for decoders `scale_norm.py`, `decoder.py` and `decoder_checkpoint.py`. The Reformer is
a model of its own: `reversible.py`, `reformer.py`. Nothing here knows of ONNX or HTTP.

Letters: B batch, H heads, H_k heads of keys where they are fewer, N length in tokens (N_q, N_k when they differ, N_max the largest), C
chunk length, K tokens of a short convolution, L labels, M wanted positions, N_l landmarks, V vocabulary, Z codes of a codebook, A hidden
units of a score, P modalities, R rounds of hashing. Widths: D model, D_k, D_v heads of keys and values, D_φ feature map, D_r random
projections, D_h hidden layer, D_c channels of a convolution, D_kv memory. S (D_k, D_v) is the state of a recurrence, z (D_k,) its
normaliser. Layout is (B, H, N, D_k) inside a mechanism and (B, N, D) between layers. A key mask (B, N) is boolean: True = attend.
"""

from models.attention.additive import AdditiveAttention, CausalAdditiveAttention
from models.attention.atrous import AtrousAttention
from models.attention.based import BasedAttention
from models.attention.bigbird import BigBirdAttention
from models.attention.causal_atrous import CausalAtrousAttention
from models.attention.causal_efficient import CausalEfficientAttention
from models.attention.causal_flash import CausalMixedChunkAttention
from models.attention.causal_gau import CausalGatedAttentionUnit
from models.attention.causal_linear import CausalLinearAttention
from models.attention.causal_longformer import CausalLongformerAttention
from models.attention.causal_lsh import CausalLSHAttention
from models.attention.causal_performer import CausalPerformerAttention
from models.attention.causal_softmax import CausalSoftmaxAttention
from models.attention.causal_sparse import CausalSparseAttention
from models.attention.causal_synthesizer import CausalSynthesizer
from models.attention.causal_vq import CausalVectorQuantisedAttention
from models.attention.cosine import CausalCosineAttention, CosineAttention
from models.attention.delta import DeltaNet
from models.attention.dot import CausalDotAttention, DotAttention
from models.attention.efficient import EfficientAttention
from models.attention.flash import MixedChunkAttention
from models.attention.gated_delta import GatedDeltaNet
from models.attention.gated_linear import GatedLinearAttention
from models.attention.gated_softmax import GatedSoftmaxAttention
from models.attention.gau import GatedAttentionUnit
from models.attention.hedgehog import HedgehogAttention
from models.attention.hybrid import HybridAttention
from models.attention.linear import LinearAttention
from models.attention.local import LocalAttention
from models.attention.longformer import LongformerAttention
from models.attention.lsh import LSHAttention
from models.attention.multi_head import SoftmaxAttention
from models.attention.nadaraya_watson import CausalNadarayaWatsonAttention, NadarayaWatsonAttention
from models.attention.narrow import NarrowAttention
from models.attention.nystrom import NystromAttention
from models.attention.performer import PerformerAttention
from models.attention.retention import Retention
from models.attention.sliding_window import SlidingWindowAttention
from models.attention.softmax1 import CausalSoftmax1Attention, Softmax1Attention
from models.attention.sparse import SparseAttention
from models.attention.synthesizer import Synthesizer
from models.attention.vq import VectorQuantisedAttention
from models.attention.wide import WideAttention

LAYERS = {
    # Encoders: a token sees past and future.
    "softmax": SoftmaxAttention,
    "narrow": NarrowAttention,
    "wide": WideAttention,
    "dot": DotAttention,
    "cosine": CosineAttention,
    "nadaraya_watson": NadarayaWatsonAttention,
    "additive": AdditiveAttention,
    "softmax1": Softmax1Attention,
    "linear": LinearAttention,
    "efficient": EfficientAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromAttention,
    "vq": VectorQuantisedAttention,
    "atrous": AtrousAttention,
    "local": LocalAttention,
    "sparse": SparseAttention,
    "longformer": LongformerAttention,
    "bigbird": BigBirdAttention,
    "hybrid": HybridAttention,
    "synthesizer": Synthesizer,
    "lsh": LSHAttention,
    "gau": GatedAttentionUnit,
    "flash": MixedChunkAttention,
    # Decoders: a token sees its past, which is a state.
    "causal_softmax": CausalSoftmaxAttention,
    "causal_dot": CausalDotAttention,
    "causal_cosine": CausalCosineAttention,
    "causal_nadaraya_watson": CausalNadarayaWatsonAttention,
    "causal_additive": CausalAdditiveAttention,
    "causal_softmax1": CausalSoftmax1Attention,
    "causal_synthesizer": CausalSynthesizer,
    "causal_lsh": CausalLSHAttention,
    "gated_softmax": GatedSoftmaxAttention,
    "sliding_window": SlidingWindowAttention,
    "causal_longformer": CausalLongformerAttention,
    "causal_atrous": CausalAtrousAttention,
    "causal_sparse": CausalSparseAttention,
    "causal_linear": CausalLinearAttention,
    "causal_efficient": CausalEfficientAttention,
    "causal_performer": CausalPerformerAttention,
    "hedgehog": HedgehogAttention,
    "based": BasedAttention,
    "retention": Retention,
    "gated_linear": GatedLinearAttention,
    "delta": DeltaNet,
    "gated_delta": GatedDeltaNet,
    "causal_vq": CausalVectorQuantisedAttention,
    "causal_gau": CausalGatedAttentionUnit,
    "causal_flash": CausalMixedChunkAttention,
}
