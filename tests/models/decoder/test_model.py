"""Decoders: whatever their layers are, a prompt may be cut, padded and batched as one likes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention.layers.causal import CausalLayer, State
from models.decoder.model import Decoder, DecoderConfig
from models.layers import LAYERS
from models.parts.positions import RotationTable, rotation_at, sinusoids, sinusoids_at
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-4  # float32 through two blocks, relative to the largest logit where that is above 1

V = 31
CONFIG = DecoderConfig(vocab_size=V, d_model=12, n_layers=2, n_heads=3, d_feedforward=20, layers="causal_linear", window=6)


def of_layers(*names: str) -> DecoderConfig:
    turned = any(LAYERS[name].capabilities.rotates for name in names)
    room = {name: {"n_positions": 2000} for name in names if LAYERS[name].capabilities.state == "bounded"}
    return replace(CONFIG, layers=names, n_layers=len(names), positions="rotary" if turned else "none", layer_options=room)


CONFIGS = {
    **{name: of_layers(name, name) for name, layer in LAYERS.items() if issubclass(layer, CausalLayer)},
    "gated_delta-window": of_layers("gated_delta", "sliding_window", "gated_delta"),
    "linear-softmax": of_layers("causal_linear", "causal_softmax"),
    "sinusoidal-layer_norm": replace(CONFIG, positions="sinusoidal", norm="layer", bias=True, tied=False),
    "scale_norm": replace(CONFIG, norm="scale"),
    "learned": replace(CONFIG, positions="learned", n_positions=2000),
    "no-positions-gelu": replace(CONFIG, positions="none", gated=False, activation="gelu", d_head=6),
}
# Layers of each kind of state, with and without rotations and codes. What a layer promises alone: attention/test_causal_layers.py.
SOME = ("causal_softmax", "sliding_window", "causal_synthesizer", "causal_vq", "causal_hybrid", "gated_delta-window", "linear-softmax")
PARTS = ("sinusoidal-layer_norm", "scale_norm", "learned", "no-positions-gelu")
every_decoder = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
some_decoders = pytest.mark.parametrize("config", [CONFIGS[name] for name in (*SOME, *PARTS)], ids=(*SOME, *PARTS))


def make(config: DecoderConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    """With every parameter moved away from where it begins, so that what is forgotten shows."""
    torch.manual_seed(0)
    decoder = Decoder(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return decoder


def random_tokens(B: int, N: int, seed: int = 1) -> Tensor:
    return torch.randint(0, V, (B, N), generator=torch.Generator().manual_seed(seed))


def flat(states: list[State]) -> dict[str, Tensor]:
    return {f"{i}_{name}": tensor for i, state in enumerate(states) for name, tensor in state.items()}


def error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1)) if reference.numel() else 0.0


# One function, however it is called


@every_decoder
@torch.no_grad()
def test_rows_of_unequal_lengths_go_together(config: DecoderConfig) -> None:
    """Three calls in which each row brings as many tokens as it likes, against each row alone."""
    calls = ((5, 9, 0), (7, 0, 3), (1, 1, 1))
    decoder, texts = make(config), random_tokens(3, 13)
    seen, states = torch.zeros(3, dtype=torch.int64), None
    logits: list[list[Tensor]] = [[], [], []]
    for call in calls:
        lengths = torch.tensor(call)
        window = seen[:, None] + torch.arange(int(lengths.max()))
        tokens = texts.gather(1, window.clamp_max(12))  # what stands beyond the length is another token, not a neutral one
        y, states = decoder(tokens, lengths, states, seen)
        for b, n in enumerate(call):
            logits[b].append(y[b, :n])
        seen = seen + lengths
    for b, n in enumerate(seen.tolist()):
        alone, states_alone = decoder(texts[b : b + 1, :n])
        assert error(torch.cat(logits[b]), alone[0]) <= EXACT
        if not decoder.grows:
            assert all(error(flat(states)[name][b], tensor[0]) <= EXACT for name, tensor in flat(states_alone).items())


@some_decoders
@torch.no_grad()
def test_logits_are_given_where_they_are_wanted(config: DecoderConfig) -> None:
    """Any number of places a row, in any order, one of them twice."""
    decoder, tokens = make(config), random_tokens(2, 9)
    wanted = torch.tensor([[8, 0, 3], [2, 2, 5]])
    (some, states), (logits, states_all) = decoder(tokens, wanted=wanted), decoder(tokens)
    assert some.shape == (2, 3, V)
    assert error(some, torch.stack([logits[b, wanted[b]] for b in range(2)])) <= EXACT
    assert all(torch.equal(flat(states)[name], tensor) for name, tensor in flat(states_all).items())


# Positions


@torch.no_grad()
def test_positions_are_computed_as_the_tables_hold_them() -> None:
    t = torch.tensor([[0, 3], [17, 99]])
    assert (sinusoids_at(t, 7) - sinusoids(100, 7)[t]).abs().max() <= EXACT
    table = RotationTable(100, 8, base=50.0, dtype=torch.float64)(t)
    ours = rotation_at(t, 8, base=50.0, dtype=torch.float64)
    assert ours.cos.shape == (2, 1, 2, 4)
    assert all((a.squeeze(1) - b).abs().max() <= EXACT for a, b in ((ours.cos, table.cos), (ours.sin, table.sin)))


@in_one_test("positions", ["rotary", "sinusoidal"])
@torch.no_grad()
def test_positions_have_no_last(positions: str) -> None:
    """At ten million, float32 weights still tell neighbours apart as float64 does."""
    decoder = make(replace(CONFIG, layers="causal_softmax", positions=positions))
    far = torch.tensor([10_000_000])
    exact, _ = decoder(random_tokens(1, 9), None, None, far)
    assert error(decoder.float()(random_tokens(1, 9), None, None, far)[0], exact) <= ROUNDED
    assert decoder.takes_positions


@torch.no_grad()
def test_positions_matter_only_to_those_who_take_them() -> None:
    for positions in ("rotary", "sinusoidal", "learned", "none"):
        n_positions = 12 if positions == "learned" else None
        decoder, tokens = make(replace(CONFIG, positions=positions, n_positions=n_positions)), random_tokens(1, 5)
        moved = error(decoder(tokens, None, None, torch.tensor([7]))[0], decoder(tokens)[0]) > 1e-6
        assert decoder.takes_positions is moved is (positions != "none")


@torch.no_grad()
def test_a_learned_position_is_a_row_that_is_added() -> None:
    decoder, tokens = make(replace(CONFIG, positions="learned", n_positions=12)), random_tokens(2, 5)
    late, _ = decoder(tokens, None, None, torch.tensor([7, 2]))
    table = decoder.position_embedding.weight
    for row, start in enumerate((7, 2)):
        table.copy_(table.roll(-start, 0))
        assert error(decoder(tokens[row : row + 1])[0], late[row : row + 1]) <= EXACT
        table.copy_(table.roll(start, 0))
    table.zero_()
    bare = make(replace(CONFIG, positions="none"))
    bare.load_state_dict({name: tensor for name, tensor in decoder.state_dict().items() if name != "position_embedding.weight"})
    assert torch.equal(decoder(tokens)[0], bare(tokens)[0])


@torch.no_grad()
def test_a_token_beyond_the_last_learned_position_is_refused_and_padding_is_not() -> None:
    decoder, tokens = make(replace(CONFIG, positions="learned", n_positions=12)), random_tokens(2, 5)
    with pytest.raises(ValueError, match=r"a token at position 12, but n_positions=12; cut the text, or build the model for more"):
        decoder(random_tokens(1, 13))
    with pytest.raises(ValueError, match=r"a token at position 12, "):
        decoder(tokens, None, None, torch.tensor([0, 8]))
    padded, _ = decoder(tokens, torch.tensor([5, 4]), None, torch.tensor([0, 8]))
    assert error(padded[1:, :4], decoder(tokens[1:, :4], None, None, torch.tensor([8]))[0]) <= EXACT


# How it begins and how it learns


@every_decoder
def test_every_parameter_gets_a_gradient(config: DecoderConfig) -> None:
    decoder, tokens = make(config, torch.float32).train(), random_tokens(4, 30)  # codes pass their gradient on in training alone
    logits, _ = decoder(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    silent = [name for name, p in decoder.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all() or not p.grad.any()]
    assert not silent


# What is refused


@in_one_test(
    ("changes", "message"),
    [
        ({"n_layers": 0}, "n_layers=0 must be a whole number of at least 1"),
        ({"d_model": 100, "n_heads": 8}, "d_model=100 is not divisible by n_heads=8"),
        ({"layers": "softmax"}, "layers='softmax' is not one of causal_softmax"),
        ({"layers": ("causal_linear", "magic")}, "layers='magic' is not one of"),
        ({"layers": ("causal_linear",)}, "layers has 1 entries for n_layers=2"),
        ({"positions": "magic"}, "positions='magic' is not one of rotary, sinusoidal, learned, none"),
        ({"positions": "learned"}, "n_positions=None, but positions='learned' needs a table; give its number of rows"),
        ({"positions": "learned", "n_positions": 0}, "n_positions=0, but positions='learned' needs a table"),
        ({"n_positions": 9}, "n_positions=9 is the size of a table, but positions='rotary' has none; leave n_positions out"),
        ({"norm": "post"}, "norm='post' is not one of rms, layer, scale"),
        ({"activation": "swoosh"}, "activation='swoosh' is not one of gelu"),
        ({"d_head": 5}, "d_head=5 is odd"),
        ({"layers": "gated_delta"}, "positions='rotary', but no layer of gated_delta supports a rotation"),
        ({"layers": "sliding_window", "window": 1}, "window=1 must be at least 2"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(replace(CONFIG, **changes))
