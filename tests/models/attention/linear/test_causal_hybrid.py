"""Causal hybrid attention: softmax in a window and sums of features for the tokens that left it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.decoder.model import Decoder, DecoderConfig
from models.decoder.window import LongWindow, hybrid, softmax_of, windowed
from models.parts.positions import rotate
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT
from tests.models.attention.windows import D_K, H_K, PIECE, SIZES, D, G, H, W, at, every_cut, in_pieces, tokens


def make(**options: object) -> CausalHybridAttention:
    torch.manual_seed(0)
    layer = CausalHybridAttention(D, H, **(SIZES | options)).double()
    for phi in (layer.phi_q, layer.phi_k):  # another map for every head
        torch.nn.init.normal_(phi.weight)
        torch.nn.init.normal_(phi.bias)
    return layer


def reference(layer: CausalHybridAttention, x: Tensor) -> Tensor:
    """The formula in loops: the weight of every pair of tokens, near ones by their distance, far ones by features at the distance W - g."""
    q, k, v = layer.heads(x)
    k, v = layer.for_every_head(k), layer.for_every_head(v)
    phi_k_weight, phi_k_bias = (p.repeat_interleave(H // H_K, 0) for p in (layer.phi_k.weight, layer.phi_k.bias))
    outputs = []
    for t in range(x.shape[1]):
        here, weights = q[:, :, t : t + 1], []
        for j in range(t + 1):
            key = k[:, :, j : j + 1]
            if j < G or j > t - (W - G):
                distance = min(t, W - 1) - j if j < G else t - j
                weights.append((rotate(here, at(torch.tensor([[distance]]))) @ key.mT / D_K**0.5).exp())
            else:
                key = rotate(key, at(torch.tensor([[G - W]])))
                phi_q = (here @ layer.phi_q.weight.mT * D_K**-0.25 + layer.phi_q.bias).exp()
                phi_k = (key @ phi_k_weight.mT * D_K**-0.25 + phi_k_bias).softmax(-1)
                weights.append(phi_q @ phi_k.mT)
        p = torch.cat(weights, dim=-1)
        outputs.append((p / p.sum(-1, keepdim=True)) @ v[:, :, : t + 1])
    return layer.to_out(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2))


@every_cut
@torch.no_grad()
def test_weights_are_exponentials_near_and_products_of_features_far(pieces: tuple[int, ...]) -> None:
    """In any pieces; the slots are reused several times."""
    layer, x = make(counted=False), tokens(2, 40)
    y, state = in_pieces(layer, x, pieces)
    assert (y - reference(layer, x)).abs().max() <= EXACT
    assert {name: tensor.shape[1:] for name, tensor in state.items()} == layer.state_shapes


@torch.no_grad()
def test_a_call_can_be_made_again_after_its_slots_are_written() -> None:
    """A server updates the slots in place. Those of the tokens that leave the window are still there."""
    layer, x, mask = make(), tokens(2, 30), torch.arange(PIECE) < torch.tensor([[PIECE], [1]])
    _, before = layer(x[:, :25])
    y, after = layer(x[:, 25 : 25 + PIECE], mask, before)
    again = layer(x[:, 25 : 25 + PIECE], mask, before | {"k": after["k"], "v": after["v"]})
    assert torch.equal(again[0], y)
    assert all(torch.equal(again[1][name], after[name]) for name in after)


def test_outputs_and_gradients_are_finite_for_large_scores() -> None:
    """Exponents beyond float32, and queries whose weights are all 0: their largest feature is 0 in every key, and hides near ones."""
    layer = make().float()
    with torch.no_grad():
        layer.phi_q.bias[0, :, 0], layer.phi_k.bias[:, :, 0] = 1e5, -1e5
    x = 100 * tokens(1, 30).float()
    layer(x)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert layer(x)[0].isfinite().all()


CONFIG = DecoderConfig(
    vocab_size=11,
    d_model=8,
    n_layers=2,
    n_heads=2,
    d_feedforward=8,
    layers="causal_softmax",
    layer_options={"causal_softmax": {"n_kv_heads": 1}},
)


@pytest.fixture
def teacher() -> Decoder:
    torch.manual_seed(0)
    teacher = Decoder(CONFIG, dtype=torch.float64)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 20 if parameter.dim() > 1 else 1
    return teacher


IDS = torch.randint(11, (2, 30), generator=torch.Generator().manual_seed(0))


@in_one_test("long", [None, LongWindow((1,), 12)], ids=["maps", "a longer window"])
@torch.no_grad()
def test_a_decoder_is_its_teacher_up_to_the_window_and_can_be_turned_back(teacher: Decoder, long: LongWindow | None) -> None:
    student = hybrid(teacher, 6, {"n_first": 2, "piece": 4}, long).double()
    ours, theirs = student(IDS)[0], teacher(IDS)[0]
    assert (ours - theirs)[:, :6].abs().max() <= EXACT
    assert (ours - theirs)[:, -1].abs().max() > 1e-3
    assert torch.equal(softmax_of(student)(IDS)[0], theirs)
    _, states = student(IDS[:, :23])
    rest, _ = student(IDS[:, 23:], None, states, torch.tensor([23, 23]))
    assert (ours[:, 23:] - rest).abs().max() <= EXACT


@torch.no_grad()
def test_windows_alone_are_turned_back_too(teacher: Decoder) -> None:
    assert torch.equal(softmax_of(windowed(teacher, 6))(IDS)[0], teacher(IDS)[0])


def test_a_decoder_with_windows_gets_no_longer_ones() -> None:
    names = ("causal_softmax", "sink_window", "causal_softmax")
    grouped = {"n_kv_heads": 1}
    options = {"causal_softmax": grouped, "sink_window": grouped | {"n_first": 1, "piece": 3}}
    decoder = Decoder(replace(CONFIG, layers=names, n_layers=3, layer_options=options))
    with pytest.raises(ValueError, match="layer 1 has a window already; longer windows are for decoders without"):
        hybrid(decoder, 6, {"n_first": 2, "piece": 4}, LongWindow((0,), 12))
    kept = hybrid(decoder, 6, {"n_first": 2, "piece": 4}).config
    assert (kept.layer_names[1], kept.layer_options["sink_window"]) == ("sink_window", options["sink_window"])


@in_one_test(
    ("long", "told"),
    [
        (LongWindow((2,), 12), r"long windows for layers \[2\]; name some of \[0, 1\], each once, and not all of them"),
        (LongWindow((-1,), 12), r"long windows for layers \[-1\]"),
        (LongWindow((1, 1), 12), r"long windows for layers \[1, 1\]"),
        (LongWindow((0, 1), 12), "and not all of them"),
        (LongWindow((1,), 6), "a long window of 6 tokens must exceed the other layers' window of 6"),
    ],
)
def test_longer_windows_that_do_not_fit_are_refused(teacher: Decoder, long: LongWindow, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        hybrid(teacher, 6, {"n_first": 2, "piece": 4}, long)
