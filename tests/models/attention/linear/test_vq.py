"""Transformer-VQ: grouped sums are softmax attention over rounded keys, and the codebook follows the keys."""

import copy

import torch
from torch import Tensor

from models.attention.layers.scaled_dot_product import attend
from models.attention.linear import codebook as book
from models.attention.linear.causal_vq import CausalVectorQuantisedAttention, attend_causal_to_codes
from models.attention.linear.codebook import update_codebooks
from models.attention.linear.vq import VectorQuantisedAttention, attend_to_codes
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

H, D_k, D_v, Z = 2, 4, 3, 6


def example(N_q: int = 5, N_k: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a codebook."""
    return drawn(2, H, N_q, D_k), drawn(2, H, N_k, D_k, seed=1), drawn(2, H, N_k, D_v, seed=2), drawn(H, Z, D_k, seed=3)


def test_grouped_sums_are_softmax_over_rounded_keys_with_padding() -> None:
    q, k, v, codes = example()
    z = book.nearest(k, codes)
    mask = torch.arange(9) < torch.tensor([6, 0])[:, None]
    o = attend_to_codes(q, z, v, codes, scale=0.7, key_mask=mask)
    expected = attend(q, book.looked_up(z, codes), v, scale=0.7, mask=mask[:, None, None])
    assert (o - expected).abs().max() <= EXACT
    assert not o[1].any()


def test_equally_near_codes_give_the_lowest_number() -> None:
    codes = torch.zeros(1, 3, 2)
    codes[0, 0] = 5.0
    assert book.nearest(torch.ones(1, 1, 4, 2), codes).flatten().tolist() == [1] * 4


def test_a_code_that_nobody_has_does_not_drown_the_others() -> None:
    """Its score of 10⁴ would leave exp(-10⁴) = 0 for every key, and 0 / 0."""
    q, v = torch.full((1, 1, 1, 2), 100.0), drawn(1, 1, 3, 2).float()
    codes = torch.tensor([[[-1.0, 0.0], [100.0, 0.0]]])
    z = torch.zeros(1, 1, 3, dtype=torch.int64)
    assert torch.allclose(attend_to_codes(q, z, v, codes, scale=1.0), v.mean(2, keepdim=True))


def test_causal_sums_take_a_scale_and_leave_padding_out() -> None:
    q, k, v, codes = example(9, 9)
    z = book.nearest(k, codes)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    o, past = attend_causal_to_codes(q, z, v, codes, scale=0.3, mask=mask)
    last = attend_to_codes(q[:, :, 8:], z, v, codes, scale=0.3, key_mask=mask)
    assert (o[:, :, 8:] - last).abs().max() <= EXACT
    assert torch.equal(past[..., -1].sum(-1), torch.tensor([[9.0] * H, [5.0] * H], dtype=torch.float64))


@in_one_test("N", [1, 2, 63, 64, 65])
@torch.no_grad()
def test_the_causal_layer_is_softmax_over_rounded_keys(N: int) -> None:
    layer = CausalVectorQuantisedAttention(6, 2, n_codes=Z).double()
    x = drawn(2, N, 6)
    q, k, v = (to(x).unflatten(-1, (2, 3)).transpose(1, 2) for to in (layer.to_q, layer.to_k, layer.to_v))
    q, k = (torch.nn.functional.layer_norm(y, (3,)) for y in (q, k))
    k_hat = book.looked_up(book.nearest(k, layer.codebook.codes), layer.codebook.codes)
    o = attend(q, k_hat, v, scale=3**-0.5, mask=torch.ones(N, N, dtype=torch.bool).tril())
    assert (layer(x)[0] - layer.to_out(o.transpose(1, 2).flatten(-2))).abs().max() <= EXACT


# Training


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [kind(6, 2, n_codes=Z).double() for kind in (VectorQuantisedAttention, CausalVectorQuantisedAttention)]


def output(layer: torch.nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = layer(x, mask)
    return y[0] if isinstance(y, tuple) else y


@in_one_test("number", [0, 1], ids=["both ways", "causal"])
def test_training_gives_the_same_numbers_and_keys_a_gradient(number: int) -> None:
    layer, x = layers()[number], drawn(2, 9, 6)
    mask = torch.arange(9) < torch.tensor([9, 4])[:, None]
    y = output(layer, x, mask)
    with torch.no_grad():
        assert (output(layer, x, mask) - y)[mask].abs().max() <= EXACT
    y[mask].sum().backward()
    assert layer.to_k.weight.grad.abs().max() > 1e-4


def test_training_in_two_calls_is_training_in_one() -> None:
    layer, x = layers()[1], drawn(2, 9, 6)
    y, state = layer(x)
    first, between = layer(x[:, :4])
    second, after = layer(x[:, 4:], None, between)
    assert (torch.cat([first, second], 1) - y).abs().max() <= EXACT
    assert (after["S"] - state["S"]).abs().max() <= EXACT


def test_the_straight_through_gradient_is_that_of_the_rounded_key() -> None:
    q, k, v, codes = example()
    z = book.nearest(k, codes)
    k.requires_grad_()
    k_hat = book.looked_up(z, codes).requires_grad_()
    through, direct = (attend(q, keys, v, scale=0.5).square().sum() for keys in (book.straight_through(k, z, codes), k_hat))
    assert (torch.autograd.grad(through, k)[0] - torch.autograd.grad(direct, k_hat)[0]).abs().max() <= EXACT


def test_commitment_is_the_mean_squared_distance_of_tokens_and_moves_keys_only() -> None:
    _, k, _, codes = example()
    k.requires_grad_()
    codes.requires_grad_()
    mask = torch.arange(9) < torch.tensor([6, 2])[:, None]
    loss = book.commitment(k, book.nearest(k, codes), codes, key_mask=mask)
    distances = (k.unsqueeze(3) - codes.unsqueeze(1)).square().sum(-1).amin(-1)  # (B, H, N)
    assert (loss - distances.transpose(1, 2)[mask].mean()).abs() <= EXACT
    loss.backward()
    assert k.grad.abs().max() > 0
    assert codes.grad is None


def test_the_codebook_moves_by_gamma_towards_the_means_of_its_keys() -> None:
    _, k, _, codes = example()
    z = book.nearest(k, codes)
    mask = torch.arange(9) < torch.tensor([6, 2])[:, None]
    sums, counts = book.updated_sums(codes, torch.ones(H, Z).double(), k, z, key_mask=mask, decay=0.9)
    for h in range(H):
        for s in range(Z):
            own = [k[b, h, j] for b in range(2) for j in range(9) if mask[b, j] and z[b, h, j] == s]
            assert abs(counts[h, s] - (0.9 + 0.1 * len(own))) <= EXACT
            assert (sums[h, s] - (0.9 * codes[h, s] + 0.1 * sum(own))).abs().max() <= EXACT


def test_dead_codes_begin_anew_as_tokens_of_the_batch() -> None:
    _, k, _, codes = example()
    mask = torch.arange(9) < torch.tensor([3, 1])[:, None]
    counts = torch.tensor([[1.0, 0.0, 2.0, 0.009, 1.0, 1.0]] * H).double()
    sums, new = book.reseeded(codes, counts, k, key_mask=mask)
    dead = counts < 0.01
    assert torch.equal(sums[~dead], codes[~dead])
    assert torch.equal(new, torch.where(dead, 1.0, counts))
    for h in range(H):
        tokens = k[:, h][mask]
        assert all((tokens == code).all(-1).any() for code in sums[h][dead[h]])
    nothing = book.reseeded(codes, counts, k, key_mask=torch.zeros(2, 9, dtype=torch.bool))
    assert torch.equal(nothing[0], codes)


def test_a_forward_changes_no_codebook_and_a_trained_layer_can_be_copied() -> None:
    layer = layers()[0]
    before = layer.codebook.codes.clone()
    layer(drawn(1, 5, 6))
    assert torch.equal(layer.codebook.codes, before)
    update_codebooks(layer)
    assert not torch.equal(layer.codebook.codes, before)
    assert torch.equal(copy.deepcopy(layer).codebook.codes, layer.codebook.codes)
    layer.eval()(drawn(1, 5, 6))
    assert layer.codebook.watched is None
