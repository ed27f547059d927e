"""Attention layers in torch, and the models that are built from them. No file here imports ONNX or HTTP libraries.

A folder imports only from folders before it in this list: `parts/`, `attention/` (the layers of the table below), `folders/`,
`encoder/`, `decoder/`, `reformer/`, `checkpoints/` (loads folders as models), `encoder_decoder/`, `maps/`, `training/`.
`configs/` and `pretrained/` are data.

Letters: B batch, H heads, H_k heads of keys where they are fewer, N length in tokens (N_q, N_k when they differ, N_max the largest), C
chunk length, K tokens of a short convolution, L labels, M wanted positions, N_l landmarks, V vocabulary, Z codes of a codebook, A hidden
units of a score, P modalities, R rounds of hashing. Widths: D model, D_k, D_v heads of keys and values, D_φ feature map, D_r random
projections, D_h hidden layer, D_c channels of a convolution, D_kv memory. S (D_k, D_v) is the state of a recurrence, z (D_k,) its
normaliser. Layout is (B, H, N, D_k) inside a mechanism and (B, N, D) between layers. A key mask (B, N) is boolean: True = attend.
"""

from pkgutil import resolve_name

from models.attention.layers.mechanism import Mechanism

_CLASSES = {
    # Layers of encoders: a token attends to earlier and later tokens.
    "softmax": "layers.softmax.SoftmaxAttention",
    "narrow": "layers.narrow.NarrowAttention",
    "wide": "layers.wide.WideAttention",
    "dot": "scoring.dot.DotAttention",
    "cosine": "scoring.cosine.CosineAttention",
    "nadaraya_watson": "scoring.nadaraya_watson.NadarayaWatsonAttention",
    "additive": "scoring.additive.AdditiveAttention",
    "softmax1": "scoring.softmax1.Softmax1Attention",
    "differential": "scoring.differential.DifferentialAttention",
    "disentangled": "scoring.disentangled.DisentangledAttention",
    "linear": "linear.linear.LinearAttention",
    "efficient": "linear.efficient.EfficientAttention",
    "performer": "linear.performer.PerformerAttention",
    "nystromformer": "linear.nystrom.NystromAttention",
    "vq": "linear.vq.VectorQuantisedAttention",
    "atrous": "sparse.atrous.AtrousAttention",
    "local": "sparse.local.LocalAttention",
    "sparse": "sparse.sparse.SparseAttention",
    "longformer": "sparse.longformer.LongformerAttention",
    "bigbird": "sparse.bigbird.BigBirdAttention",
    "hybrid": "linear.hybrid.HybridAttention",
    "synthesizer": "scoring.synthesizer.Synthesizer",
    "lsh": "sparse.lsh.LSHAttention",
    "gau": "gated.gau.GatedAttentionUnit",
    "flash": "gated.flash.MixedChunkAttention",
    # Layers of decoders: a token attends to itself and to earlier tokens, of which the layer keeps a state.
    "causal_softmax": "layers.causal_softmax.CausalSoftmaxAttention",
    "causal_dot": "scoring.causal_dot.CausalDotAttention",
    "causal_cosine": "scoring.causal_cosine.CausalCosineAttention",
    "causal_nadaraya_watson": "scoring.causal_nadaraya_watson.CausalNadarayaWatsonAttention",
    "causal_additive": "scoring.causal_additive.CausalAdditiveAttention",
    "causal_softmax1": "scoring.causal_softmax1.CausalSoftmax1Attention",
    "causal_differential": "scoring.causal_differential.CausalDifferentialAttention",
    "causal_synthesizer": "scoring.causal_synthesizer.CausalSynthesizer",
    "causal_lsh": "sparse.causal_lsh.CausalLSHAttention",
    "gated_softmax": "scoring.gated_softmax.GatedSoftmaxAttention",
    "sliding_window": "sparse.sliding_window.SlidingWindowAttention",
    "sink_window": "sparse.sink_window.SinkWindowAttention",
    "causal_longformer": "sparse.causal_longformer.CausalLongformerAttention",
    "causal_atrous": "sparse.causal_atrous.CausalAtrousAttention",
    "causal_sparse": "sparse.causal_sparse.CausalSparseAttention",
    "causal_linear": "linear.causal_linear.CausalLinearAttention",
    "causal_efficient": "linear.causal_efficient.CausalEfficientAttention",
    "causal_performer": "linear.causal_performer.CausalPerformerAttention",
    "causal_hybrid": "linear.causal_hybrid.CausalHybridAttention",
    "hedgehog": "linear.hedgehog.HedgehogAttention",
    "based": "linear.based.BasedAttention",
    "retention": "recurrent.retention.Retention",
    "gated_linear": "recurrent.gated_linear.GatedLinearAttention",
    "delta": "recurrent.delta.DeltaNet",
    "gated_delta": "recurrent.gated_delta.GatedDeltaNet",
    "causal_vq": "linear.causal_vq.CausalVectorQuantisedAttention",
    "causal_gau": "gated.causal_gau.CausalGatedAttentionUnit",
    "causal_flash": "gated.causal_flash.CausalMixedChunkAttention",
}

# Name -> class. Tables and tests list the layers in this order.
LAYERS: dict[str, type[Mechanism]] = {name: resolve_name(f"models.attention.{path}") for name, path in _CLASSES.items()}
