"""Options that make no layer, and inputs that a layer has no form for, are refused with the values and the choices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from models.attention.layers.cross import CrossAttention
from models.attention.layers.fused_block import FusedBlock
from models.attention.layers.mechanism import Mechanism
from models.attention.layers.short_convolution import ShortConvolution
from models.attention.linear.codebook import Codebook
from models.layers import LAYERS
from tests.cases import in_one_test

OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("narrow", {"d_head": 5}, "d_head=5 does not fit narrow heads"),
    ("wide", {"d_head": 5}, "d_head=5 does not fit wide heads"),
    ("efficient", {"normalisation": "mean"}, "normalisation='mean' is not one of softmax, scaling"),
    ("gau", {"normalisation": "relu"}, "normalisation='relu' is not one of length, valid, softmax, softmax_plus"),
    ("causal_gau", {"normalisation": "length"}, "'length' is not one of valid, softmax, softmax_plus, which have a causal form"),
    ("hybrid", {"block": -1}, "block=-1 must be at least 0"),
    ("hybrid", {"feature_map": "sine"}, "feature_map='sine' is not one of elu, hedgehog, taylor, positive"),
    ("nystromformer", {"n_landmarks": 0}, "n_landmarks=0 must be at least 1"),
    ("nystromformer", {"conv_kernel": 4}, "conv_kernel=4 must be odd"),
    ("gated_delta", {"n_key_heads": 3}, "n_heads=2 is not a multiple of n_key_heads=3"),
    ("additive", {"queries_at_once": 0}, "queries_at_once=0 must be at least 1"),
    *(("cosine", {"tau": tau}, f"tau={tau} must be above 0 and at most 100") for tau in (0.0, -1.0, 101.0, math.nan)),
    *(("nadaraya_watson", {"bandwidth": h}, f"bandwidth={h} must be above 1e-06") for h in (0.0, -1.0, math.nan)),
    ("disentangled", {"terms": ()}, r"terms=\(\) must be a list of some of c2p, p2c"),
    ("disentangled", {"terms": ("c2c",)}, "must be a list of some of c2p, p2c"),
    ("disentangled", {"terms": ("c2p", "c2p")}, "each at most once"),
    ("disentangled", {"span": 1}, "span=1 must be at least 2"),
    ("disentangled", {"span": 64, "max_distance": 33}, "max_distance=33 must be above"),
    ("local", {"window": -1}, "window=-1 must be at least 0"),
    ("local", {"block": 0}, "block=0 must be at least 1"),
    ("longformer", {"window": 5}, "window=5 must be even"),
    ("longformer", {"dilation": (1, 2, 3)}, "dilation has 3 entries for n_heads=2"),
    ("longformer", {"dilation": (1, 0)}, "dilation=0 must be at least 1"),
    ("longformer", {"n_global": -1}, "n_global=-1 must be at least 0"),
    ("causal_longformer", {"window": 1}, "window=1 must be at least 2"),
    ("sliding_window", {"window": 1}, "window=1 must be at least 2 tokens"),
    ("sink_window", {"window": 2, "n_first": 2}, "window=2 must be at least 3"),
    ("sink_window", {"n_first": 0}, "n_first=0 must be at least 1"),
    ("sink_window", {"piece": 0}, "piece=0 must be"),
    ("bigbird", {"block": 0}, "block=0 must be at least 1"),
    ("bigbird", {"n_random": -1}, "n_random=-1 must be at least 0"),
    ("lsh", {"rule": "trax"}, "rule='trax' is not one of paper, chunk"),
    ("lsh", {"chunk": 0}, "chunk=0 must be at least 1 token"),
    ("lsh", {"n_buckets": 5}, "n_buckets=5 must be even"),
    ("causal_lsh", {"n_buckets": (4, 3)}, r"n_buckets=\(4, 3\) must be even"),
    ("causal_lsh", {"n_rounds": 0}, "n_rounds=0 must be at least 1"),
    ("causal_lsh", {"n_buckets": (8192, 8192)}, "are 67108864 buckets, more than 16777216"),
    ("differential", {"depth": 0}, "depth=0 must be at least 1"),
    ("differential", {"d_head": 3}, "d_head=3 is odd"),
]
TWINS: list[tuple[str, dict[str, Any], str]] = [  # of layers with a causal twin that refuses the same
    ("linear", {"feature_map": "softmax"}, "feature_map='softmax' is not one of elu, relu, relu_squared, exp, taylor_1, taylor_2"),
    ("performer", {"kernel": "cosine"}, "kernel='cosine' is not one of positive, hyperbolic, relu"),
    ("performer", {"rows": "sparse"}, "rows='sparse' is not one of orthogonal, iid, regularised"),
    ("performer", {"n_features": 0}, "n_features=0 must be at least 1"),
    ("flash", {"group": 1}, "group=1 must be at least 2 tokens"),
    ("atrous", {"rate": 0}, "rate=0 must be at least 1"),
    ("sparse", {"mode": "random"}, "mode='random' is not one of union, strided, fixed"),
    ("sparse", {"stride": 0}, "stride=0 must be at least 1"),
    ("sparse", {"mode": "fixed", "stride": 8, "n_summaries": 9}, "n_summaries=9 must be from 1 to stride=8"),
]


@in_one_test(("name", "options", "said"), [*OPTIONS, *TWINS, *((f"causal_{name}", *rest) for name, *rest in TWINS)])
def test_options_that_make_no_layer(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LAYERS[name](8, 2, **options)


DIVIDED = [layer for name, layer in LAYERS.items() if name != "wide"]  # every head of a wide layer is as wide as the model


@in_one_test("layer", [*DIVIDED, partial(CrossAttention, d_memory=5), partial(FusedBlock, d_head=None)])
def test_heads_that_do_not_fit(layer: type[Mechanism]) -> None:
    options = layer.examples.small if isinstance(layer, type) else {}
    with pytest.raises(ValueError, match="d_model=100 is not divisible by n_heads=8"):
        layer(100, 8, **options)


@in_one_test(
    ("make", "said"),
    [
        (partial(LAYERS["sparse"], 8, 1, mode="strided"), "n_heads=1: mode='strided' has heads of two types"),
        (partial(Codebook, 2, 0, 4), "n_codes=0 must be at least 1"),
        (partial(ShortConvolution, 5, 1), "kernel=1 must be at least 2"),
    ],
)
def test_parts_that_cannot_be_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@in_one_test("name", ["linear", "lsh", "gau"])
def test_layers_without_scores_of_pairs_take_no_mask_of_pairs(name: str) -> None:
    with pytest.raises(ValueError, match=f"{LAYERS[name].__name__} supports no .*pair mask"):
        LAYERS[name](8, 2)(torch.zeros(1, 4, 8), pair_mask=torch.ones(4, 4, dtype=torch.bool))
