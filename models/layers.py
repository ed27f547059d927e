"""The attention layers by name. Configs, checkpoints, tables and tests use these names, in this order."""

from models.attention.gated.causal_flash import CausalMixedChunkAttention
from models.attention.gated.causal_gau import CausalGatedAttentionUnit
from models.attention.gated.flash import MixedChunkAttention
from models.attention.gated.gau import GatedAttentionUnit
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.mechanism import Mechanism
from models.attention.layers.narrow import NarrowAttention
from models.attention.layers.softmax import SoftmaxAttention
from models.attention.layers.wide import WideAttention
from models.attention.linear.based import BasedAttention
from models.attention.linear.causal_efficient import CausalEfficientAttention
from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.attention.linear.causal_linear import CausalLinearAttention
from models.attention.linear.causal_performer import CausalPerformerAttention
from models.attention.linear.causal_vq import CausalVectorQuantisedAttention
from models.attention.linear.efficient import EfficientAttention
from models.attention.linear.hedgehog import HedgehogAttention
from models.attention.linear.hybrid import HybridAttention
from models.attention.linear.linear import LinearAttention
from models.attention.linear.nystrom import NystromAttention
from models.attention.linear.performer import PerformerAttention
from models.attention.linear.vq import VectorQuantisedAttention
from models.attention.recurrent.delta import DeltaNet
from models.attention.recurrent.gated_delta import GatedDeltaNet
from models.attention.recurrent.gated_linear import GatedLinearAttention
from models.attention.recurrent.retention import Retention
from models.attention.scoring.additive import AdditiveAttention, CausalAdditiveAttention
from models.attention.scoring.causal_synthesizer import CausalSynthesizer
from models.attention.scoring.cosine import CausalCosineAttention, CosineAttention
from models.attention.scoring.differential import CausalDifferentialAttention, DifferentialAttention
from models.attention.scoring.disentangled import DisentangledAttention
from models.attention.scoring.dot import CausalDotAttention, DotAttention
from models.attention.scoring.gated_softmax import GatedSoftmaxAttention
from models.attention.scoring.nadaraya_watson import CausalNadarayaWatsonAttention, NadarayaWatsonAttention
from models.attention.scoring.softmax1 import CausalSoftmax1Attention, Softmax1Attention
from models.attention.scoring.synthesizer import Synthesizer
from models.attention.sparse.atrous import AtrousAttention
from models.attention.sparse.bigbird import BigBirdAttention
from models.attention.sparse.causal_atrous import CausalAtrousAttention
from models.attention.sparse.causal_longformer import CausalLongformerAttention
from models.attention.sparse.causal_lsh import CausalLSHAttention
from models.attention.sparse.causal_sparse import CausalSparseAttention
from models.attention.sparse.local import LocalAttention
from models.attention.sparse.longformer import LongformerAttention
from models.attention.sparse.lsh import LSHAttention
from models.attention.sparse.sink_window import SinkWindowAttention
from models.attention.sparse.sliding_window import SlidingWindowAttention
from models.attention.sparse.sparse import SparseAttention

LAYERS: dict[str, type[Mechanism]] = {
    # Layers of encoders: a token attends to earlier and later tokens.
    "softmax": SoftmaxAttention,
    "narrow": NarrowAttention,
    "wide": WideAttention,
    "dot": DotAttention,
    "cosine": CosineAttention,
    "nadaraya_watson": NadarayaWatsonAttention,
    "additive": AdditiveAttention,
    "softmax1": Softmax1Attention,
    "differential": DifferentialAttention,
    "disentangled": DisentangledAttention,
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
    # Layers of decoders: a token attends to itself and to earlier tokens, of which the layer keeps a state.
    "causal_softmax": CausalSoftmaxAttention,
    "causal_dot": CausalDotAttention,
    "causal_cosine": CausalCosineAttention,
    "causal_nadaraya_watson": CausalNadarayaWatsonAttention,
    "causal_additive": CausalAdditiveAttention,
    "causal_softmax1": CausalSoftmax1Attention,
    "causal_differential": CausalDifferentialAttention,
    "causal_synthesizer": CausalSynthesizer,
    "causal_lsh": CausalLSHAttention,
    "gated_softmax": GatedSoftmaxAttention,
    "sliding_window": SlidingWindowAttention,
    "sink_window": SinkWindowAttention,
    "causal_longformer": CausalLongformerAttention,
    "causal_atrous": CausalAtrousAttention,
    "causal_sparse": CausalSparseAttention,
    "causal_linear": CausalLinearAttention,
    "causal_efficient": CausalEfficientAttention,
    "causal_performer": CausalPerformerAttention,
    "causal_hybrid": CausalHybridAttention,
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
