"""A reversible stack has the gradients of plain autograd, keeps as much for 8 blocks as for 2, and runs backwards."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.attention.layers.softmax import SoftmaxAttention
from models.attention.sparse.lsh import LSHAttention
from models.parts.feedforward import ChunkedFeedForward, FeedForward
from models.reformer.reversible import ReversibleBlock, ReversibleStack
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula on inputs that were computed back from the outputs
ROUNDED = 1e-5  # float32, backwards through 4 blocks
D = 8


class NormedAttention(nn.Module):
    def __init__(self, layer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(D), layer, nn.Dropout(dropout)

    def forward(self, x: Tensor, key_mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        return self.dropout(self.layer(self.norm(x), key_mask, pair_bias=bias))


def stack(n_blocks: int = 4, *, lsh: bool = False, dropout: float = 0.0) -> ReversibleStack:
    torch.manual_seed(0)
    blocks = []
    for _ in range(n_blocks):
        layer = LSHAttention(D, 2, chunk=4, n_buckets=4) if lsh else SoftmaxAttention(D, 2)
        feedforward = FeedForward(D, 24, activation="gelu", gated=False, bias=True)
        blocks.append(ReversibleBlock(NormedAttention(layer, dropout), nn.Sequential(nn.LayerNorm(D), feedforward, nn.Dropout(dropout))))
    return ReversibleStack(blocks)


def plain(model: ReversibleStack, x1: Tensor, x2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
    for block in model.blocks:
        x1, x2 = block(x1, x2, *context)
    return x1, x2


def tokens(N: int = 9, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def mask(N: int = 9) -> Tensor:
    return torch.arange(N) < torch.tensor([[N], [N - 3]])


def loss_and_gradients(run: Callable, leaves: list[Tensor], *inputs: Tensor | None) -> list[Tensor]:
    """Both outputs, weighted differently, after the same random numbers."""
    torch.manual_seed(5)
    y1, y2 = run(*inputs)
    loss = (y1 * torch.linspace(-1, 1, D)).sum() + y2.square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@in_one_test("lsh", [False, True])
@in_one_test("dropout", [0.0, 0.3])
def test_gradients_are_those_of_plain_autograd(lsh: bool, dropout: float) -> None:
    model, x1, x2 = stack(lsh=lsh, dropout=dropout).double(), tokens().requires_grad_(), tokens().flip(1).requires_grad_()
    leaves = [x1, x2, *model.parameters()]
    ours = loss_and_gradients(model, leaves, x1, x2, mask())
    reference = loss_and_gradients(lambda *inputs: plain(model, *inputs), leaves, x1, x2, mask())
    assert max(float((a - b).abs().max()) for a, b in zip(ours, reference, strict=True)) <= EXACT


def test_what_the_blocks_share_gets_the_sum_of_their_gradients() -> None:
    """A bias on the scores that all blocks are given, and a feed-forward layer that two of them have in common."""
    model, x = stack(3).double(), tokens()
    model.blocks[2].G = model.blocks[0].G
    bias = torch.randn(1, 2, 9, 9, dtype=torch.float64, requires_grad=True)
    leaves = [bias, *model.parameters()]
    ours = loss_and_gradients(model, leaves, x, x, mask(), bias)
    reference = loss_and_gradients(lambda *inputs: plain(model, *inputs), leaves, x, x, mask(), bias)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, reference, strict=True)) <= EXACT


def test_the_random_generator_goes_on_as_if_nothing_was_computed_twice() -> None:
    model, x = stack(dropout=0.3), tokens(dtype=torch.float32)
    y1, _ = model(x, x, mask())
    expected = torch.get_rng_state()
    y1.sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)


def test_autocast_is_repeated_and_leaves_the_weights_their_gradients() -> None:
    """Weights cast for the pass without gradients are not those that a layer outside uses after it."""
    model, x = stack(2), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y1, y2 = model(x, x, mask())
        outside = model.blocks[0].G(x)
    (y1.sum() + y2.sum()).backward()
    gradient = model.blocks[1].F.layer.to_q.weight.grad.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y1, y2 = plain(model, x, x, mask())
    reference = torch.autograd.grad(y1.sum() + y2.sum(), model.blocks[1].F.layer.to_q.weight)[0]
    assert (gradient - reference).abs().max() <= 0.02 * reference.abs().max()  # bfloat16: 8 bits
    assert outside.requires_grad
    outside.sum().backward()


def kept(run: Callable, model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, the model's parameters left out."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y1, y2 = run(x, x, mask())
        del y1, y2
    return sum(storages.values())


def test_memory_does_not_grow_with_depth() -> None:
    x = tokens(dtype=torch.float32).requires_grad_()
    shallow, deep = stack(2), stack(8)
    assert kept(shallow, shallow, x) == kept(deep, deep, x) <= 3 * x.untyped_storage().nbytes() + mask().numel()
    plain_deep = kept(lambda *inputs: plain(deep, *inputs), deep, x)
    assert plain_deep > 3 * kept(lambda *inputs: plain(shallow, *inputs), shallow, x) > 10 * kept(deep, deep, x)


@torch.no_grad()
def test_the_inverse_gives_back_what_went_in() -> None:
    model, x1, x2 = stack(), tokens(dtype=torch.float32), tokens(dtype=torch.float32).flip(1)
    back = model.inverse(*model(x1, x2, mask()), mask())
    assert max(float((a - b).abs().max()) for a, b in zip(back, (x1, x2), strict=True)) <= ROUNDED


# The feed-forward layer in chunks


@in_one_test("N", [1, 3, 4, 5, 8, 9])
@in_one_test("gated", [False, True])
def test_chunks_of_tokens_are_the_same_function(N: int, gated: bool) -> None:
    chunked = ChunkedFeedForward(D, 24, activation="gelu", gated=gated, bias=True, chunk=4).double()
    whole = FeedForward(D, 24, activation="gelu", gated=gated, bias=True).double()
    whole.load_state_dict(chunked.state_dict())
    x = tokens(N).requires_grad_()
    gradients = [torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]) for layer in (chunked, whole)]
    assert max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)) <= EXACT
    with torch.no_grad():
        assert (chunked(x) - whole(x)).abs().max() <= EXACT


def test_chunks_keep_their_inputs_and_not_the_wider_layer() -> None:
    chunked = ChunkedFeedForward(D, 24, activation="gelu", gated=False, bias=True, chunk=4)
    whole = FeedForward(D, 24, activation="gelu", gated=False, bias=True)
    x = tokens(64, dtype=torch.float32).requires_grad_()
    sizes = [kept(lambda x, *_, layer=layer: (layer(x), None), layer, x) for layer in (chunked, whole)]
    assert sizes[0] <= 2 * x.untyped_storage().nbytes() < sizes[1]
