"""What the shared tests need to know of single layers and mechanisms, as data."""

from models.attention.synthesizer_scores import KINDS as EVERY_KIND

# Keywords of a layer's constructor where its defaults would hide the mechanism at the short lengths of these tests.
OPTIONS: dict[str, dict] = {
    "nystromformer": {"n_landmarks": 4, "conv_kernel": 5},
    "local": {"window": 3, "block": 4},
    "atrous": {"rate": 3},
    "sparse": {"stride": 4},
    "longformer": {"window": 6, "n_global": 2, "block": 4},
    "bigbird": {"block": 3, "n_random": 1},
    "hybrid": {"block": 4},
    "causal_longformer": {"window": 6, "n_global": 2},
    "causal_atrous": {"rate": 3},
    "causal_sparse": {"stride": 4},
    "sliding_window": {"window": 6},
    "lsh": {"chunk": 4, "n_buckets": 6},
    "causal_lsh": {"n_buckets": 2},
    "synthesizer": {"kinds": EVERY_KIND, "n_positions": 128, "fixed": True},
    "causal_synthesizer": {"kinds": EVERY_KIND, "n_positions": 140, "rank": 3},
    "vq": {"n_codes": 7},
    "causal_vq": {"n_codes": 7},
    "flash": {"group": 4},
    "causal_flash": {"group": 4},
}

# State tensors that later tokens need not change: counts that end, running maxima, and what a sequence's first tokens have left.
SETTLES = ("n", "m", "k_first", "v_first", "k_global", "v_global")

# Every mechanism of the specification: the pure function, and what it takes besides q, k, v and the masks. An outside reference can be
# compared with these directly: whatever the specification leaves open is an argument.
MECHANISMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scaled dot product": ("models.attention.scaled_dot_product.attend", ("scale", "bias")),
    "dot product": ("models.attention.dot.attend_dot", ("bias",)),
    "cosine": ("models.attention.cosine.attend_cosine", ("tau", "eps", "bias")),
    "Nadaraya-Watson": ("models.attention.nadaraya_watson.attend_nadaraya_watson", ("h", "bias")),
    "additive": ("models.attention.additive.attend_additive", ("W_q", "W_k", "w_v", "bias", "queries_at_once")),
    "softmax1": ("models.attention.softmax1.attend_softmax1", ("scale", "bias")),
    "softmax1, online": ("models.attention.softmax1.attend_softmax1_online", ("scale", "keys_at_once")),
    "modality fusion": ("models.attention.fusion.fuse", ("W", "b", "c")),
    "fused projections": ("models.attention.fused_block.attend_fused", ("W_qkv", "n_heads", "scale", "dropout")),
    "Synthesizer": ("models.attention.synthesizer.attend_by_scores", ("mask",)),
    "Synthesizer, dense": ("models.attention.synthesizer_scores.dense_scores", ("W_1", "b_1", "W_2", "b_2")),
    "Synthesizer, factorised dense": ("models.attention.synthesizer_scores.factorised_dense_scores", ("W_A", "W_B")),
    "Synthesizer, factorised random": ("models.attention.synthesizer_scores.factorised_random_scores", ("R_1", "R_2")),
    "Synthesizer, mixture": ("models.attention.synthesizer_scores.mixed_scores", ("alpha",)),
    "quadratic encoding": ("models.attention.convolution_as_attention.quadratic_scores", ("offsets", "position_weights")),
    "convolution as attention": (
        "models.attention.convolution_as_attention.attend_to_places",
        ("offsets", "position_weights", "W_v", "W_o"),
    ),
    "linear": ("models.attention.linear.attend_linear", ("eps", "feature_map")),
    "linear, features given": ("models.attention.linear.attend_features", ("eps",)),
    "linear, causal, features given": ("models.attention.causal.attend_causal_features", ("past", "mask", "decay", "eps", "recurrence")),
    "Hedgehog, features": ("models.attention.hedgehog.hedgehog_features", ("weight", "bias")),
    "Based, features": ("models.attention.based.taylor", ()),
    "Efficient": ("models.attention.efficient.attend_efficient", ("normalisation", "length")),
    "Efficient, causal": ("models.attention.causal_efficient.attend_causal_efficient", ("past", "recurrence")),
    "Performer": ("models.attention.performer.attend_performer", ("projection", "kernel", "scale", "eps", "relu_eps")),
    "Performer, causal": (
        "models.attention.causal_performer.attend_causal_performer",
        ("projection", "past", "kernel", "scale", "eps", "relu_eps", "recurrence"),
    ),
    "Performer, projection": ("models.attention.performer.draw_projection", ("generator", "rows")),
    "Performer, log features": ("models.attention.performer.log_features", ("projection", "kernel", "scale")),
    "Nyström": (
        "models.attention.nystrom.attend_nystrom",
        ("n_landmarks", "scale", "n_iterations", "landmarks", "short_by_softmax", "conv"),
    ),
    "Nyström, landmarks": ("models.attention.landmarks.segment_means", ("n_landmarks", "mask")),
    "Nyström, inverse": ("models.attention.nystrom.iterative_inverse", ("n_iterations",)),
    "local": ("models.attention.local.attend_local", ("window", "scale", "causal", "block")),
    "atrous": ("models.attention.atrous.attend_atrous", ("rate", "scale", "causal")),
    "sparse": ("models.attention.sparse.attend_sparse", ("mode", "stride", "n_summaries", "n_heads_a", "scale", "causal")),
    "vector quantisation": ("models.attention.codebook.nearest", ("codebook",)),
    "vector-quantised": ("models.attention.vq.attend_to_codes", ("codebook", "scale")),
    "vector-quantised, causal": (
        "models.attention.causal_vq.attend_causal_to_codes",
        ("codebook", "past", "scale", "products", "recurrence"),
    ),
    "reseeded codebook": ("models.attention.codebook.reseeded", ("sums", "counts", "least", "drawn")),
    "codes of a codebook": ("models.attention.codebook.codes_of", ("sums", "counts", "least")),
    "moving codebook": ("models.attention.codebook.moved", ("sums", "counts", "decay")),
    "buckets by angle": ("models.attention.lsh_buckets.angular_buckets", ("rotations", "n_buckets")),
    "buckets by hyperplanes": ("models.attention.lsh_buckets.hyperplane_buckets", ("planes",)),
    "LSH": (
        "models.attention.lsh.attend_lsh",
        ("buckets", "causal", "rule", "chunk", "before", "after", "scale", "self_logit", "eps"),
    ),
    "LSH, with a cache": ("models.attention.causal_lsh.attend_lsh_to_cache", ("buckets", "state", "scale", "self_logit", "eps")),
    "gated attention weights": ("models.attention.gau.weights", ("normalisation", "bias", "length", "least_length", "scale", "log_base")),
    "longformer": ("models.attention.longformer.attend_longformer", ("window", "n_global", "global_mask", "dilation", "scale", "block")),
    "longformer, causal": (
        "models.attention.causal_longformer.attend_causal_longformer",
        ("past", "window", "n_global", "scale", "attend"),
    ),
    "bigbird": ("models.attention.bigbird.attend_bigbird", ("table", "block", "scale", "full_up_to")),
    "hybrid": ("models.attention.hybrid.attend_hybrid", ("phi_q", "phi_k", "block", "scale", "gain")),
    "mixed chunks": ("models.attention.flash.attend_in_groups", ("group", "causal", "bias", "divisor", "quad_divisor")),
    "mixed chunks, causal": (
        "models.attention.causal_flash.attend_causal_in_groups",
        ("past", "group", "bias", "divisor", "quad_divisor", "recurrence"),
    ),
    "linear recurrence, parallel": ("models.attention.recurrence.parallel", ("decay", "beta")),
    "linear recurrence, in chunks": ("models.attention.recurrence.chunkwise", ("decay", "beta", "chunk")),
    "linear recurrence, step by step": ("models.attention.recurrence.recurrent", ("decay", "beta")),
}
