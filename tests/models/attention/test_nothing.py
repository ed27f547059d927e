"""No rows, no tokens, no keys: every layer and every function of LAYERS answers with the shape that it owes, and with 0."""

from functools import partial

import pytest
import torch

from models.attention.layers.causal import CausalLayer
from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.efficient import attend_efficient
from models.attention.linear.linear import attend_linear
from models.attention.linear.nystrom import attend_nystrom
from models.attention.linear.performer import attend_performer
from models.attention.scoring.additive import attend_additive
from models.attention.scoring.cosine import attend_cosine
from models.attention.scoring.dot import attend_dot
from models.attention.scoring.nadaraya_watson import attend_nadaraya_watson
from models.attention.scoring.softmax1 import attend_softmax1, attend_softmax1_online
from models.attention.sparse.local import attend_local
from models.layers import LAYERS
from tests.cases import in_one_test
from tests.models.attention import test_causal_layers, test_layers

D = test_layers.D


@pytest.mark.parametrize("name", LAYERS)
@in_one_test(("B", "N", "masked"), [(B, N, masked) for B, N in ((0, 5), (2, 0), (0, 0)) for masked in (False, True)])
@torch.no_grad()
def test_a_layer_answers_nothing_with_nothing(name: str, B: int, N: int, masked: bool) -> None:
    x, mask = torch.zeros(B, N, D, dtype=torch.float64), torch.zeros(B, N, dtype=torch.bool) if masked else None
    if issubclass(LAYERS[name], CausalLayer):
        y, state = test_causal_layers.make(name)(x, mask)
        assert {key: tuple(value.shape[1:]) for key, value in state.items()} == test_causal_layers.make(name).state_shapes
    else:
        y = test_layers.make(name)(x, mask)
    assert (y.shape, y.dtype) == ((B, N, D), torch.float64)


SCORING = {
    "softmax": attend,
    "softmax1": attend_softmax1,
    "softmax1, online": attend_softmax1_online,
    "dot": attend_dot,
    "cosine": partial(attend_cosine, tau=1.0),
    "nadaraya_watson": partial(attend_nadaraya_watson, h=1.0),
    "additive": partial(attend_additive, W_q=torch.ones(2, 4, 4), W_k=torch.ones(2, 4, 4), w_v=torch.ones(2, 4)),
    "linear": attend_linear,
    "efficient": attend_efficient,
    "performer": partial(attend_performer, projection=torch.ones(6, 4)),
    "nystrom": attend_nystrom,
    "local": partial(attend_local, window=3),
}


@in_one_test("name", SCORING)
@in_one_test(("N_q", "N_k"), [(3, 0), (0, 3), (0, 0)])
def test_queries_without_keys_get_zero(name: str, N_q: int, N_k: int) -> None:
    o = SCORING[name](torch.ones(2, 2, N_q, 4), torch.ones(2, 2, N_k, 4), torch.ones(2, 2, N_k, 5))
    assert o.shape == (2, 2, N_q, 5)
    assert not o.any()


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if issubclass(layer, CausalLayer)])
@torch.no_grad()
def test_no_token_leaves_a_state_bit_for_bit(name: str) -> None:
    layer = test_causal_layers.make(name)
    _, before = layer(test_causal_layers.tokens(2, 5))
    _, after = layer(test_causal_layers.tokens(2, 0), None, before)
    assert all(torch.equal(before[key], after[key]) for key in before)
