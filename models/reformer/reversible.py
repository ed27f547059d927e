"""Reversible residual blocks. Their inputs are recomputed from their outputs and need not be stored for the backward pass.

y1 = x1 + F(x2, ..),   y2 = x2 + G(y1);   inverse:  x2 = y2 - G(y1),   x1 = y1 - F(x2, ..)
F is attention (with its norm). G is the feed-forward layer, whose input is the new y1. A model begins with x1 = x2 = embeddings.

Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3. Training stores only the outputs of the last
block and a few kB of random state per block, and computes every F and G twice. Without gradients, and in an export, blocks run as
ordinary residual sums.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from models.parts.modules import Modules

Context = tuple[Tensor | None, ...]  # arguments of every F other than x, such as a key mask


class ReversibleBlock(nn.Module):
    """A reversible block of two functions F and G, which must preserve the shape of x."""

    def __init__(self, F: nn.Module, G: nn.Module) -> None:
        super().__init__()
        self.F = F
        self.G = G

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.F(x2, *context)
        return y1, x2 + self.G(y1)

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs of `forward`, up to rounding. F and G must not have dropout."""
        x2 = y2 - self.G(y1)
        return y1 - self.F(x2, *context), x2


class ReversibleStack(nn.Module):
    """A sequence of reversible blocks. Its gradients are those of plain autograd up to rounding, even with dropout or autocast.

    In training, F and G are computed again in the backward pass and must return the same as in the forward pass. Random numbers may be
    used, since the state of the generators is restored. Second derivatives raise an error.
    """

    def __init__(self, blocks: Iterable[ReversibleBlock]) -> None:
        super().__init__()
        self.blocks: Modules[ReversibleBlock] = Modules(blocks)

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            apply: Any = _Recomputed.apply
            return apply(self.blocks, len(context), x1, x2, *context, *self.parameters())
        for block in self.blocks:
            x1, x2 = block(x1, x2, *context)
        return x1, x2

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        for block in reversed(list(self.blocks)):
            y1, y2 = block.inverse(y1, y2, *context)
        return y1, y2


class _Recomputed(Function):
    """An autograd function of the whole stack. It stores only the outputs and recomputes blocks in backward, the last one
    first."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Modules[ReversibleBlock], n_context: int, x1: Tensor, x2: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the blocks and return the outputs. `given` contains n_context tensors of context, then the parameters."""
        context = given[:n_context]
        ctx.blocks, ctx.n_context, ctx.moments = blocks, n_context, []
        with _autocast(x1.device, cached=False):  # otherwise autocast would cache copies of weights without gradients, and use them later
            for block in blocks:
                before_F = _RandomState(x1.device)
                x1 = x1 + block.F(x2, *context)
                ctx.moments.append((before_F, _RandomState(x1.device)))
                x2 = x2 + block.G(x1)
        ctx.save_for_backward(x1, x2, *given)  # parameters too, so that autograd detects in-place changes
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        x1, x2, *given = ctx.saved_tensors
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in given[: ctx.n_context]]
        sums: dict[Tensor, Tensor] = {}  # context tensor (leaf) or parameter -> sum of its gradients over the blocks
        for block, (before_F, before_G) in zip(reversed(ctx.blocks), reversed(ctx.moments), strict=True):
            with before_G.again():
                change, d = _gradients(block.G, x1, (), d2, sums)
            x2, d1 = x2 - change, d1 + d
            with before_F.again():
                change, d = _gradients(block.F, x2, tuple(leaves), d1, sums)
            x1, d2 = x1 - change, d2 + d
        wanted = [*leaves, *ctx.blocks.parameters()]
        return None, None, d1, d2, *(None if x is None else sums.get(x) for x in wanted)


def _gradients(layer: nn.Module, x: Tensor, context: Context, d: Tensor, sums: dict[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the layer's output and the gradient of x, given the gradient d of the output. The gradients of context and
    parameters are added to `sums`.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = layer(x, *context)
    inputs = [x, *(leaf for leaf in (*context, *layer.parameters()) if leaf is not None and leaf.requires_grad)]
    first, *others = torch.autograd.grad(y, inputs, d.to(y.dtype), allow_unused=True)
    for leaf, gradient in zip(inputs[1:], others, strict=True):
        if gradient is not None:
            sums[leaf] = sums[leaf] + gradient if leaf in sums else gradient
    return y.detach(), torch.zeros_like(x) if first is None else first


class _RandomState:
    """A snapshot of the states of the random generators and of autocast, which `again` restores."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.random = torch.get_rng_state()
        self.random_there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.casts, self.dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore these states within the block. Afterwards the generators continue from the state that they had before."""
        there = self.random_there
        with torch.random.fork_rng(devices=[] if there is None else [self.device]):
            torch.set_rng_state(self.random)
            if there is not None:
                torch.cuda.set_rng_state(there, self.device)
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.casts, cache_enabled=False):
                yield


def _autocast(device: torch.device, *, cached: bool) -> Any:
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=cached)
