"""Every function and class that an outside reference can be compared with, as data."""

from typing import NamedTuple

from models.layers import LAYERS

# State tensors, of any layer, that later tokens need not change.
SETTLES = {name for layer in LAYERS.values() for name in layer.settles}


class Mechanism(NamedTuple):
    """A row of the table: a function or, where there is none apart from its layer, the class, with every argument it takes."""

    callable: str
    arguments: tuple[str, ...]
    layers: tuple[str, ...] = ()  # the names in LAYERS that compute it


# Every mechanism of the specification. An outside reference can be compared with the functions directly, and with a class by its weights:
# whatever the specification leaves open is an argument.
MECHANISMS = {
    "scaled dot product": Mechanism("models.attention.layers.scaled_dot_product.attend", ("q", "k", "v", "scale", "mask", "bias")),
    "dot product": Mechanism("models.attention.scoring.dot.attend_dot", ("q", "k", "v", "mask", "bias"), layers=("dot", "causal_dot")),
    "cosine": Mechanism(
        "models.attention.scoring.cosine.attend_cosine", ("q", "k", "v", "tau", "eps", "mask", "bias"), layers=("cosine", "causal_cosine")
    ),
    "Nadaraya-Watson": Mechanism(
        "models.attention.scoring.nadaraya_watson.attend_nadaraya_watson",
        ("q", "k", "v", "h", "mask", "bias"),
        layers=("nadaraya_watson", "causal_nadaraya_watson"),
    ),
    "additive": Mechanism(
        "models.attention.scoring.additive.attend_additive",
        ("q", "k", "v", "W_q", "W_k", "w_v", "mask", "bias", "queries_at_once"),
        layers=("additive", "causal_additive"),
    ),
    "softmax1": Mechanism(
        "models.attention.scoring.softmax1.attend_softmax1",
        ("q", "k", "v", "scale", "mask", "bias"),
        layers=("softmax1", "causal_softmax1"),
    ),
    "softmax1, online": Mechanism(
        "models.attention.scoring.softmax1.attend_softmax1_online", ("q", "k", "v", "scale", "mask", "keys_at_once")
    ),
    "modality fusion": Mechanism("models.attention.layers.fusion.fuse", ("h", "W", "b", "c", "mask")),
    "fused projections": Mechanism(
        "models.attention.layers.fused_block.attend_fused", ("x", "W_qkv", "n_heads", "scale", "key_mask", "dropout")
    ),
    "Synthesizer": Mechanism("models.attention.scoring.synthesizer.attend_by_scores", ("scores", "v", "mask"), layers=("synthesizer",)),
    "Synthesizer, dense": Mechanism("models.attention.scoring.synthesizer_scores.dense_scores", ("x", "W_1", "b_1", "W_2", "b_2")),
    "Synthesizer, factorised dense": Mechanism("models.attention.scoring.synthesizer_scores.factorised_dense_scores", ("x", "W_A", "W_B")),
    "Synthesizer, factorised random": Mechanism("models.attention.scoring.synthesizer_scores.factorised_random_scores", ("R_1", "R_2")),
    "Synthesizer, mixture": Mechanism("models.attention.scoring.synthesizer_scores.mixed_scores", ("scores", "alpha")),
    "quadratic encoding": Mechanism("models.attention.scoring.convolution_as_attention.quadratic_scores", ("offsets", "position_weights")),
    "convolution as attention": Mechanism(
        "models.attention.scoring.convolution_as_attention.attend_to_places", ("x", "offsets", "position_weights", "W_v", "W_o")
    ),
    "disentangled": Mechanism(
        "models.attention.scoring.disentangled.attend_disentangled",
        ("q", "k", "v", "r_k", "r_q", "mask", "bias"),
        layers=("disentangled",),
    ),
    "disentangled, rows": Mechanism("models.attention.scoring.disentangled.distance_rows", ("distances", "span", "max_distance")),
    "linear": Mechanism(
        "models.attention.linear.linear.attend_linear", ("q", "k", "v", "key_mask", "eps", "feature_map"), layers=("linear",)
    ),
    "linear, features given": Mechanism("models.attention.linear.linear.attend_features", ("phi_q", "phi_k", "v", "key_mask", "eps")),
    "linear, causal, features given": Mechanism(
        "models.attention.layers.causal.attend_causal_features", ("phi_q", "phi_k", "v", "past", "mask", "decay", "eps", "recurrence")
    ),
    "Hedgehog, features": Mechanism("models.attention.linear.hedgehog.hedgehog_features", ("x", "weight", "bias")),
    "Based, features": Mechanism("models.attention.linear.based.taylor", ("x",)),
    "Efficient": Mechanism(
        "models.attention.linear.efficient.attend_efficient", ("q", "k", "v", "key_mask", "normalisation", "length"), layers=("efficient",)
    ),
    "Efficient, causal": Mechanism(
        "models.attention.linear.causal_efficient.attend_causal_efficient",
        ("q", "k", "v", "past", "mask", "recurrence"),
        layers=("causal_efficient",),
    ),
    "Performer": Mechanism(
        "models.attention.linear.performer.attend_performer",
        ("q", "k", "v", "projection", "key_mask", "kernel", "scale", "eps", "relu_eps"),
        layers=("performer",),
    ),
    "Performer, causal": Mechanism(
        "models.attention.linear.causal_performer.attend_causal_performer",
        ("q", "k", "v", "projection", "past", "mask", "kernel", "scale", "eps", "relu_eps", "recurrence"),
        layers=("causal_performer",),
    ),
    "Performer, projection": Mechanism(
        "models.attention.linear.random_features.draw_projection", ("n_rows", "d_head", "generator", "rows")
    ),
    "Performer, log features": Mechanism("models.attention.linear.random_features.log_features", ("x", "projection", "kernel", "scale")),
    "Nyström": Mechanism(
        "models.attention.linear.nystrom.attend_nystrom",
        ("q", "k", "v", "n_landmarks", "query_mask", "key_mask", "scale", "n_iterations", "landmarks", "short_by_softmax", "conv"),
        layers=("nystromformer",),
    ),
    "Nyström, landmarks": Mechanism("models.attention.linear.landmarks.segment_means", ("x", "n_landmarks", "mask")),
    "Nyström, inverse": Mechanism("models.attention.linear.nystrom.iterative_inverse", ("A", "n_iterations")),
    "local": Mechanism(
        "models.attention.sparse.local.attend_local", ("q", "k", "v", "window", "scale", "key_mask", "causal", "block"), layers=("local",)
    ),
    "atrous": Mechanism(
        "models.attention.sparse.atrous.attend_atrous", ("q", "k", "v", "rate", "scale", "key_mask", "causal"), layers=("atrous",)
    ),
    "sparse": Mechanism(
        "models.attention.sparse.sparse.attend_sparse",
        ("q", "k", "v", "mode", "stride", "n_summaries", "n_heads_a", "scale", "key_mask", "causal"),
        layers=("sparse",),
    ),
    "vector quantisation": Mechanism("models.attention.linear.codebook.nearest", ("k", "codebook", "products")),
    "vector-quantised": Mechanism(
        "models.attention.linear.vq.attend_to_codes", ("q", "codes", "v", "codebook", "scale", "key_mask"), layers=("vq",)
    ),
    "vector-quantised, causal": Mechanism(
        "models.attention.linear.causal_vq.attend_causal_to_codes",
        ("q", "codes", "v", "codebook", "past", "scale", "mask", "products", "recurrence"),
        layers=("causal_vq",),
    ),
    "vector-quantised, causal, with a position bias": Mechanism(
        "models.attention.linear.vq_near.attend_causal_to_codes_and_near", ("q", "codes", "v", "codebook", "bias", "scale", "mask")
    ),
    "reseeded codebook": Mechanism("models.attention.linear.codebook.reseeded", ("sums", "counts", "k", "key_mask", "least", "drawn")),
    "codes of a codebook": Mechanism("models.attention.linear.codebook.codes_of", ("sums", "counts", "least")),
    "moving codebook": Mechanism("models.attention.linear.codebook.updated_sums", ("sums", "counts", "k", "codes", "key_mask", "decay")),
    "buckets by angle": Mechanism("models.attention.sparse.lsh_buckets.angular_buckets", ("x", "rotations", "n_buckets")),
    "buckets by hyperplanes": Mechanism("models.attention.sparse.lsh_buckets.hyperplane_buckets", ("x", "planes")),
    "LSH": Mechanism(
        "models.attention.sparse.lsh.attend_lsh",
        ("qk", "v", "buckets", "key_mask", "causal", "rule", "chunk", "before", "after", "scale", "self_logit", "eps"),
        layers=("lsh",),
    ),
    "LSH, with a cache": Mechanism(
        "models.attention.sparse.causal_lsh.attend_lsh_to_cache",
        ("qk", "v", "buckets", "state", "scale", "self_logit", "eps"),
        layers=("causal_lsh",),
    ),
    "gated attention weights": Mechanism(
        "models.attention.gated.gau.weights", ("q", "k", "normalisation", "mask", "bias", "length", "least_length", "scale", "log_base")
    ),
    "longformer": Mechanism(
        "models.attention.sparse.longformer.attend_longformer",
        ("local", "of_globals", "window", "n_global", "global_mask", "dilation", "scale", "key_mask", "block"),
        layers=("longformer",),
    ),
    "longformer, causal": Mechanism(
        "models.attention.sparse.causal_longformer.attend_causal_longformer",
        ("local", "of_globals", "past", "window", "n_global", "scale", "mask", "attend"),
        layers=("causal_longformer",),
    ),
    "bigbird": Mechanism(
        "models.attention.sparse.bigbird.attend_bigbird",
        ("q", "k", "v", "table", "block", "scale", "key_mask", "full_up_to"),
        layers=("bigbird",),
    ),
    "bigbird, with global tokens": Mechanism(
        "models.attention.sparse.bigbird_etc.attend_bigbird_etc", ("q", "k", "v", "table", "n_global", "block", "scale", "key_mask")
    ),
    "hybrid": Mechanism(
        "models.attention.linear.hybrid.attend_hybrid",
        ("q", "k", "v", "phi_q", "phi_k", "block", "scale", "gain", "key_mask"),
        layers=("hybrid",),
    ),
    "mixed chunks": Mechanism(
        "models.attention.gated.flash.attend_in_groups",
        ("quad_q", "quad_k", "lin_q", "lin_k", "v", "group", "causal", "key_mask", "bias", "divisor", "quad_divisor"),
        layers=("flash",),
    ),
    "mixed chunks, causal": Mechanism(
        "models.attention.gated.causal_flash.attend_causal_in_groups",
        ("quad_q", "quad_k", "lin_q", "lin_k", "v", "past", "group", "mask", "bias", "divisor", "quad_divisor", "recurrence"),
        layers=("causal_flash",),
    ),
    "linear recurrence, parallel": Mechanism("models.attention.layers.recurrence.parallel", ("q", "k", "v", "S", "decay", "beta")),
    "linear recurrence, in chunks": Mechanism(
        "models.attention.layers.recurrence.chunkwise", ("q", "k", "v", "S", "decay", "beta", "chunk")
    ),
    "linear recurrence, step by step": Mechanism("models.attention.layers.recurrence.recurrent", ("q", "k", "v", "S", "decay", "beta")),
    "multi-head": Mechanism(
        "models.attention.layers.softmax.SoftmaxAttention", ("d_model", "n_heads", "d_head", "bias"), layers=("softmax",)
    ),
    "multi-head, narrow": Mechanism(
        "models.attention.layers.narrow.NarrowAttention", ("d_model", "n_heads", "d_head", "bias"), layers=("narrow",)
    ),
    "multi-head, wide": Mechanism("models.attention.layers.wide.WideAttention", ("d_model", "n_heads", "d_head", "bias"), layers=("wide",)),
    "multi-head, cross": Mechanism("models.attention.layers.cross.CrossAttention", ("d_model", "n_heads", "d_memory", "d_head", "bias")),
    "multi-head, causal": Mechanism(
        "models.attention.layers.causal_softmax.CausalSoftmaxAttention",
        ("d_model", "n_heads", "d_head", "bias", "n_kv_heads", "out_bias", "qk_norm", "norm_eps"),
        layers=("causal_softmax",),
    ),
    "multi-head, causal, gated": Mechanism(
        "models.attention.scoring.gated_softmax.GatedSoftmaxAttention",
        ("d_model", "n_heads", "d_head", "bias", "n_kv_heads", "norm_eps"),
        layers=("gated_softmax",),
    ),
    "with a cache": Mechanism("models.attention.layers.causal.attend_to_past", ("q", "k", "v", "scale", "mask")),
    "sliding window": Mechanism(
        "models.attention.sparse.windows.attend_to_windows", ("q", "k", "v", "scale", "present", "seen_first"), layers=("sliding_window",)
    ),
    "window and first tokens": Mechanism(
        "models.attention.sparse.sink_window.attend_with_first",
        ("q", "q_first", "k", "v", "seen", "is_first"),
        layers=("sink_window",),
    ),
    "hybrid, causal": Mechanism(
        "models.attention.linear.causal_hybrid.CausalHybridAttention",
        (
            "d_model",
            "n_heads",
            "d_head",
            "bias",
            "window",
            "n_first",
            "piece",
            "counted",
            "n_kv_heads",
            "out_bias",
            "qk_norm",
            "norm_eps",
        ),
        layers=("causal_hybrid",),
    ),
    "any score, causal": Mechanism("models.attention.layers.causal_scored.CausalScoredAttention", ("d_model", "n_heads", "d_head", "bias")),
    "additive, hidden units given": Mechanism(
        "models.attention.scoring.additive.attend_hidden", ("q", "k", "v", "w_v", "mask", "bias", "queries_at_once")
    ),
    "atrous, sparse, by step": Mechanism("models.attention.sparse.pattern_cache.attend_to_slots", ("q", "k", "v", "slots")),
    "atrous, slots": Mechanism("models.attention.sparse.pattern_cache.every", ("t", "n_slots", "rate"), layers=("causal_atrous",)),
    "sparse, slots": Mechanism("models.attention.sparse.pattern_cache.latest", ("t", "window"), layers=("causal_sparse",)),
    "bigbird, random blocks": Mechanism("models.attention.sparse.bigbird.random_blocks", ("draws", "n_blocks")),
    "linear, causal": Mechanism(
        "models.attention.linear.causal_linear.CausalLinearAttention",
        ("d_model", "n_heads", "d_head", "bias", "feature_map"),
        layers=("causal_linear",),
    ),
    "Hedgehog": Mechanism(
        "models.attention.linear.hedgehog.HedgehogAttention", ("d_model", "n_heads", "d_head", "bias"), layers=("hedgehog",)
    ),
    "Based": Mechanism(
        "models.attention.linear.based.BasedAttention", ("d_model", "n_heads", "d_head", "bias", "d_key"), layers=("based",)
    ),
    "retention": Mechanism(
        "models.attention.recurrent.retention.Retention", ("d_model", "n_heads", "d_head", "bias"), layers=("retention",)
    ),
    "gated linear": Mechanism(
        "models.attention.recurrent.gated_linear.GatedLinearAttention", ("d_model", "n_heads", "d_head", "bias"), layers=("gated_linear",)
    ),
    "delta rule": Mechanism("models.attention.recurrent.delta.DeltaNet", ("d_model", "n_heads", "d_head", "bias"), layers=("delta",)),
    "gated delta rule": Mechanism(
        "models.attention.recurrent.gated_delta.GatedDeltaNet",
        ("d_model", "n_heads", "d_head", "bias", "n_key_heads", "d_value", "kernel", "norm_eps"),
        layers=("gated_delta",),
    ),
    "short convolution": Mechanism("models.attention.layers.short_convolution.convolve", ("x", "weight", "past")),
    "straight-through codes": Mechanism("models.attention.linear.codebook.straight_through", ("k", "codes", "codebook")),
    "commitment": Mechanism("models.attention.linear.codebook.commitment", ("k", "codes", "codebook", "key_mask")),
    "unit keys": Mechanism("models.attention.sparse.lsh.unit_keys", ("qk", "eps")),
    "Performer, relu features": Mechanism(
        "models.attention.linear.random_features.relu_features", ("x", "projection", "scale", "relu_eps")
    ),
    "Synthesizer, causal": Mechanism(
        "models.attention.scoring.causal_synthesizer.CausalSynthesizer",
        ("d_model", "n_heads", "d_head", "bias", "kinds", "n_positions", "d_hidden", "a", "rank", "fixed", "seed"),
        layers=("causal_synthesizer",),
    ),
    "gated attention unit": Mechanism(
        "models.attention.gated.gau.GatedAttentionUnit",
        ("d_model", "n_heads", "d_head", "bias", "expansion", "normalisation", "relative_bias", "least_length", "interleaved"),
        layers=("gau",),
    ),
    "gated attention unit, causal": Mechanism(
        "models.attention.gated.causal_gau.CausalGatedAttentionUnit",
        ("d_model", "n_heads", "d_head", "bias", "expansion", "normalisation", "relative_bias", "least_length"),
        layers=("causal_gau",),
    ),
    "GAU-alpha": Mechanism("models.encoder.gau_alpha.GauAlpha", ("config", "dtype")),
    "sinusoids": Mechanism("models.parts.positions.sinusoids", ("n_positions", "d_model")),
    "rotation": Mechanism("models.parts.positions.rotate", ("x", "rotation", "interleaved")),
    "xPos": Mechanism("models.parts.xpos.xpos", ("rotation", "t", "gamma", "scale_base")),
    "ScaleNorm": Mechanism("models.parts.scale_norm.ScaleNorm", ("d_model", "eps")),
    "distance buckets": Mechanism("models.parts.positions.distance_buckets", ("distances", "n_buckets", "max_distance", "causal")),
    "relative bias": Mechanism(
        "models.parts.positions.RelativeBias", ("n_positions", "n_heads", "n_buckets", "max_distance", "causal", "scale")
    ),
    "reversible block": Mechanism("models.reformer.reversible.ReversibleBlock", ("F", "G")),
    "feed-forward layer in chunks": Mechanism(
        "models.parts.feedforward.ChunkedFeedForward", ("d_model", "d_feedforward", "activation", "gated", "bias", "chunk")
    ),
    "modified GRU": Mechanism("models.encoder_decoder.modified_gru.advance", ("given", "s", "W_sr", "W_sz", "W_ss")),
}
