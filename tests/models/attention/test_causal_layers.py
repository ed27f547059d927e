"""What every causal layer promises: whole, in pieces or token by token, alone or in a batch, padded or not, it is one function."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from models.attention.gated.gau import GatedProjections
from models.attention.layers.causal import CausalLayer, State
from models.attention.layers.recurrence import chunkwise, parallel, recurrent
from models.layers import LAYERS
from models.parts.positions import Rotation, rotation_at
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32: 24 bits, sums of a few hundred terms; relative to the largest output where that is above 1

D, H = 12, 3
LENGTHS = (1, 2, 63, 64, 65)

CAUSAL = [name for name, layer in LAYERS.items() if issubclass(layer, CausalLayer)]
every_layer = pytest.mark.parametrize("name", CAUSAL)
every_true_gradient = pytest.mark.parametrize("name", [name for name in CAUSAL if not LAYERS[name].capabilities.straight_through])
constant_size = pytest.mark.parametrize("name", [name for name in CAUSAL if LAYERS[name].capabilities.state != "growing"])
every_average = pytest.mark.parametrize("name", [name for name in CAUSAL if LAYERS[name].capabilities.averages])
recurrences = pytest.mark.parametrize("name", [name for name in CAUSAL if LAYERS[name].capabilities.pads_to == "chunk"])


def make(name: str, *, d_model: int = D, n_heads: int = H, dtype: torch.dtype = torch.float64) -> CausalLayer:
    """A layer with every parameter moved away from where it begins, biases too."""
    torch.manual_seed(0)
    layer = LAYERS[name](d_model, n_heads, bias=True, **LAYERS[name].examples.small)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer.to(dtype)


def tokens(B: int, N: int, *, d_model: int = D, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(B, N, d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotation(layer: CausalLayer, *, begin: int | Sequence[int], N: int, dtype: torch.dtype = torch.float64) -> Rotation | None:
    """Of positions begin, begin + 1, ..; `begin` is one for all rows, or one for each."""
    if not layer.capabilities.rotates:
        return None
    begin = torch.tensor([begin]) if isinstance(begin, int) else torch.tensor(begin)
    return rotation_at(begin[:, None] + torch.arange(N), D // H, base=100.0, dtype=dtype)


def in_pieces(layer: CausalLayer, x: Tensor, *sizes: int) -> tuple[Tensor, State]:
    """x, so many tokens at a time."""
    outputs, state, begin = [], layer.new_state(x), 0
    for size in sizes:
        piece = x[:, begin : begin + size]
        y, state = layer.prefill(piece, state, rotation=rotation(layer, begin=begin, N=size, dtype=x.dtype))
        outputs.append(y)
        begin += size
    return torch.cat(outputs, dim=1), state


def lengths_mask(*lengths: int) -> Tensor:
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]


def error(ours: tuple[Tensor, State], reference: tuple[Tensor, State]) -> float:
    """The largest difference of the output and of every state tensor, relative where the largest value is above 1."""
    assert ours[1].keys() == reference[1].keys()
    pairs = [(ours[0], reference[0]), *((ours[1][name], tensor) for name, tensor in reference[1].items())]
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1)) for a, b in pairs if b.numel())


def rows(state: State, b: int) -> State:
    return {name: tensor[b : b + 1] for name, tensor in state.items()}


# One function


@every_layer
@torch.no_grad()
def test_whole_in_pieces_and_token_by_token(name: str) -> None:
    layer, x = make(name), tokens(2, max(LENGTHS))
    outputs, states, state = [], [], layer.init_state(2, dtype=torch.float64)
    for t in range(max(LENGTHS)):
        y, state = layer.step(x[:, t : t + 1], state, rotation=rotation(layer, begin=t, N=1))
        outputs.append(y)
        states.append(state)
    one_by_one = torch.cat(outputs, dim=1)
    for N in LENGTHS:
        expected = one_by_one[:, :N], states[N - 1]
        assert error(in_pieces(layer, x[:, :N], N), expected) <= EXACT, N
        assert N <= 2 or error(in_pieces(layer, x[:, :N], N // 3, N - N // 3), expected) <= EXACT, N
    with pytest.raises(ValueError, match="a step takes 1 token, not 65"):
        layer.step(x, state)


@every_layer
@in_one_test("N", LENGTHS)
@torch.no_grad()
def test_float32_is_float64_rounded_at_every_length(name: str, N: int) -> None:
    layer, x = make(name), tokens(2, N)
    exact = in_pieces(layer, x, N)
    assert error(in_pieces(layer.float(), x.float(), N), exact) <= ROUNDED


@recurrences
@in_one_test("execution", [parallel, recurrent])
def test_the_execution_may_be_exchanged(name: str, execution: Callable) -> None:
    layer, x = make(name), tokens(2, 70)
    y, state = in_pieces(layer, x, 30, 40)
    weight = layer.to_z.weight if isinstance(layer, GatedProjections) else layer.to_k.weight
    gradient = torch.autograd.grad(y.square().mean(), weight)[0]
    assert layer.recurrence is chunkwise
    layer.recurrence = execution
    other = in_pieces(layer, x, 30, 40)
    assert error(other, (y, state)) <= EXACT
    assert (torch.autograd.grad(other[0].square().mean(), weight)[0] - gradient).abs().max() <= EXACT


# Rows, padding, the future


@every_layer
@torch.no_grad()
def test_rows_of_unequal_lengths_get_what_each_gets_alone(name: str) -> None:
    """In three calls, in which a row is now long, now short, now absent."""
    calls = ((7, 3, 0, 1), (2, 9, 5, 0), (1, 1, 1, 1))
    layer = make(name)
    seen, state = [0] * 4, None
    alone: list[State | None] = [None] * 4
    for seed, lengths in enumerate(calls):
        x = tokens(4, max(lengths), seed=seed)
        x[~lengths_mask(*lengths)] *= 1e3  # values in the padding change nothing
        y, state = layer(x, lengths_mask(*lengths), state, rotation=rotation(layer, begin=seen, N=max(lengths)))
        for b, n in enumerate(lengths):
            if n == 0:
                continue
            y_alone, alone[b] = layer(x[b : b + 1, :n], None, alone[b], rotation=rotation(layer, begin=seen[b], N=n))
            assert (y[b, :n] - y_alone[0]).abs().max() <= EXACT
            seen[b] += n
    if layer.capabilities.state != "growing":
        assert max(error((y[b, :1], rows(state, b)), (y[b, :1], alone[b])) for b in range(4)) <= EXACT


@constant_size
@torch.no_grad()
def test_padding_leaves_the_state_bit_for_bit(name: str) -> None:
    layer = make(name, dtype=torch.float32)
    _, state = layer(tokens(2, 9, dtype=torch.float32))
    _, after = layer(tokens(2, 70, dtype=torch.float32, seed=2), lengths_mask(0, 70), state)
    assert all(torch.equal(after[name][0], tensor[0]) for name, tensor in state.items())
    assert all(not torch.equal(after[name][1], tensor[1]) for name, tensor in state.items() if name not in layer.settles)


@every_layer
@torch.no_grad()
def test_the_future_never_changes_the_past(name: str) -> None:
    layer, x = make(name), tokens(1, 70)
    other = x.clone()
    other[:, 40:] = 3 * tokens(1, 30, seed=2)
    y, y_other = layer(x)[0], layer(other)[0]
    assert torch.equal(y_other[:, :40], y[:, :40])
    assert (y_other[:, 40:] - y[:, 40:]).abs().max() > 1e-3


# The state


@every_layer
@torch.no_grad()
def test_a_state_is_what_the_layer_says_it_is(name: str) -> None:
    """Zeros at the beginning, as given shapes, in float32 beside half-precision weights; the one given to a call stays as it was."""
    layer = make(name, dtype=torch.bfloat16)
    beginning = layer.init_state(2)
    assert {name: tuple(tensor.shape) for name, tensor in beginning.items()} == {n: (2, *s) for n, s in layer.state_shapes.items()}
    x = tokens(2, 5, dtype=torch.bfloat16)
    y, state = layer(x, None, beginning)
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(not tensor.any() for tensor in beginning.values())
    assert error((y, state), layer(x)) == 0
    kept = {name: tensor.clone() for name, tensor in state.items()}
    _, after = layer(x, None, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    assert all((after[name].shape == tensor.shape) is (layer.capabilities.state != "growing") for name, tensor in state.items())


@every_layer
@torch.no_grad()
def test_autocast_does_not_reach_the_state(name: str) -> None:
    layer, x = make(name, dtype=torch.float32), tokens(2, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        y_next, state = layer(x, None, state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.isfinite(y).all()
    assert torch.isfinite(y_next).all()


@every_layer
@torch.no_grad()
def test_a_rotation_matters_to_the_layers_that_say_so(name: str) -> None:
    layer, x = make(name), tokens(2, 6)
    turned = rotation_at(torch.arange(6)[None], D // H, base=100.0, dtype=torch.float64)
    assert (error(layer(x, rotation=turned), layer(x)) > 1e-3) is layer.capabilities.rotates


# Numbers


@every_layer
@in_one_test("x", [1e3 * tokens(2, 70), torch.ones(2, 70, D), torch.zeros(2, 70, D)], ids=["big", "1", "0"])
def test_large_and_equal_inputs_stay_finite(name: str, x: Tensor) -> None:
    layer, x = make(name, dtype=torch.float32), x.float().requires_grad_()
    y, state = layer(x, lengths_mask(70, 0))
    y, state = layer(x, lengths_mask(1, 70), state)
    (y.sum() + sum(tensor.sum() for tensor in state.values())).backward()
    assert all(torch.isfinite(tensor).all() for tensor in (y, x.grad, *state.values()))
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


@every_layer
@in_one_test("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_stays_finite_over_many_tokens(name: str, dtype: torch.dtype) -> None:
    layer = make(name, dtype=dtype)
    N = {"constant": 3000, "growing": 500, "bounded": getattr(layer, "n_positions", 0)}[layer.capabilities.state]
    y, state = layer(tokens(1, N, dtype=dtype))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


@every_true_gradient
def test_gradients(name: str) -> None:
    """Against finite differences, through two calls and the state between them, with a row that is absent from the first."""
    layer = make(name, d_model=4, n_heads=2)
    x = tokens(2, 5, d_model=4, seed=2).requires_grad_()

    def both(x: Tensor) -> Tensor:
        y, state = layer(x[:, :3], lengths_mask(3, 0))
        return torch.cat([y[:1], layer(x[:, 3:], lengths_mask(1, 2), state)[0][:, :1].expand(-1, 3, -1)])

    assert torch.autograd.gradcheck(both, (x,), fast_mode=True)


# What the layers compute


def heads(layer: CausalLayer, x: Tensor) -> list[Tensor]:
    """q, k, v, (B, H, N, D_k) each."""
    return [to(x).unflatten(-1, (H, -1)).transpose(1, 2) for to in (layer.to_q, layer.to_k, layer.to_v)]


def projected(layer: CausalLayer, o: Tensor) -> Tensor:
    return layer.to_out(o.transpose(1, 2).flatten(-2))


@every_average
@torch.no_grad()
def test_a_constant_value_passes_through(name: str) -> None:
    """Weights sum to 1, up to the eps of linear attention. Gates are open."""
    layer, x = make(name), tokens(2, 9)
    for projection, bias in {"to_v": layer.to_v.bias.clone(), "to_v_global": layer.to_v.bias, **dict(layer.gates)}.items():
        if hasattr(layer, projection):
            nn.init.zeros_(getattr(layer, projection).weight)
            getattr(layer, projection).bias.copy_(torch.as_tensor(bias))
    expected = layer.to_out(layer.to_v.bias)
    assert (layer(x)[0] - expected).abs().max() <= 1e-5


@in_one_test("name", ["causal_softmax", "sliding_window", "retention"])
@torch.no_grad()
def test_rotated_scores_know_distances_only(name: str) -> None:
    layer, x = make(name), tokens(2, 9)
    here, there = (layer(x, rotation=rotation(layer, begin=begin, N=9))[0] for begin in (0, 1000))
    assert (here - there).abs().max() <= EXACT


@in_one_test("name", ["retention", "gated_linear", "delta", "gated_delta"])
@torch.no_grad()
def test_a_sum_beyond_half_precision_is_normalised_before_it_is_rounded(name: str) -> None:
    """A token of 16 sigma that comes 256 times: o grows beyond 65,504, and its norm does not."""
    torch.manual_seed(0)
    layer = LAYERS[name](256, 8)
    x = 16 * torch.randn(1, 1, 256).expand(1, 256, 256)
    exact, _ = layer(x)
    y, state = layer.half()(x.half())
    assert y.dtype == torch.float16
    assert y.isfinite().all()
    assert (y.float() - exact).abs().max() <= 0.02 * exact.abs().max()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
