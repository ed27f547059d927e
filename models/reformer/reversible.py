"""Reversible residual blocks: a block's inputs can be computed from its outputs, and so need not be kept for the backward pass.

y1 = x1 + F(x2, ..),   y2 = x2 + G(y1);   backwards x2 = y2 - G(y1),   x1 = y1 - F(x2, ..)
F is attention (with its norm), G the feed-forward layer, which reads the y1 that is already new. A model begins with x1 = x2 = embeddings.

Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3. Training keeps the outputs of the last block and a
few kB of random state a block, whatever the depth, and computes every F and G twice. Without gradients, and in an export, it is the plain
sum.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from models.parts.modules import Modules

Context = tuple[Tensor | None, ...]  # the other arguments of every F beside x, such as a key mask


class ReversibleBlock(nn.Module):
    """F and G, which keep the shape of their input."""

    def __init__(self, F: nn.Module, G: nn.Module) -> None:
        super().__init__()
        self.F = F
        self.G = G

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.F(x2, *context)
        return y1, x2 + self.G(y1)

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor | None) -> tuple[Tensor, Tensor]:
        """The inputs of `forward`, up to rounding; F and G must not have dropout."""
        x2 = y2 - self.G(y1)
        return y1 - self.F(x2, *context), x2


class ReversibleStack(nn.Module):
    """Blocks one after the other, with the gradients of plain autograd up to rounding, dropout and autocast included.

    In training, F and G must not change what they compute between forward and backward by other means than random numbers; gradients of
    gradients are refused.
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
    """The stack as one function, which keeps its outputs and computes the rest again, last block first."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Modules[ReversibleBlock], n_context: int, x1: Tensor, x2: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """given: the context, then the parameters."""
        context = given[:n_context]
        ctx.blocks, ctx.n_context, ctx.moments = blocks, n_context, []
        with _autocast(x1.device, cached=False):  # or weights cast here, without gradients, would be used outside
            for block in blocks:
                before_F = _Moment(x1.device)
                x1 = x1 + block.F(x2, *context)
                ctx.moments.append((before_F, _Moment(x1.device)))
                x2 = x2 + block.G(x1)
        ctx.save_for_backward(x1, x2, *given)  # parameters too: autograd then refuses a backward pass after they were changed in place
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple[Tensor | None, ...]:
        x1, x2, *given = ctx.saved_tensors
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in given[: ctx.n_context]]
        sums: dict[Tensor, Tensor] = {}  # of the gradients of leaves and parameters
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
    """The layer's output, and the gradient of x where that of the output is d; those of context and parameters are added to `sums`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = layer(x, *context)
    inputs = [x, *(leaf for leaf in (*context, *layer.parameters()) if leaf is not None and leaf.requires_grad)]
    first, *others = torch.autograd.grad(y, inputs, d.to(y.dtype), allow_unused=True)
    for leaf, gradient in zip(inputs[1:], others, strict=True):
        if gradient is not None:
            sums[leaf] = sums[leaf] + gradient if leaf in sums else gradient
    return y.detach(), torch.zeros_like(x) if first is None else first


class _Moment:
    """The states of the random generators and of autocast at one moment, to be restored."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.random = torch.get_rng_state()
        self.random_there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.casts, self.dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore them for a block; afterwards the generators continue from their earlier state."""
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
