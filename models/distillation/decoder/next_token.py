"""The loss of the next token: how far a student's distribution is from its teacher's, KL(teacher || student), and from the true token.

With V = 49,152 tokens of the vocabulary, the logits of one text of 4,096 tokens have 0.8 GB. So they are computed for some tokens at a
time, in float32 (products in TF32 on a GPU), and the gradient of the hidden states with them: the unembedding W is not trained.

L = (1 - λ) KL(p || q) - λ log q[y],   dL/dlogits = q - (1 - λ) p - λ onehot(y),   dL/dhidden = dL/dlogits W
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2_048  # tokens whose logits are in memory at once


class Divergence(torch.autograd.Function):
    """The mean loss L and the mean KL(p || q), in nats, of T tokens. Call `divergence` instead."""

    @staticmethod
    def forward(ctx: Any, ours: Tensor, theirs: Tensor, weight: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        T = ours.shape[0]
        grad = torch.empty_like(ours)
        total, whole = ours.new_zeros(()), ours.new_zeros(())
        for begin in range(0, T, CHUNK):
            part = slice(begin, begin + CHUNK)
            log_p, log_q = ((x[part] @ weight.T).log_softmax(-1) for x in (theirs, ours))
            p = log_p.exp()
            kl = (p * (log_p - log_q)).sum(-1)
            loss = kl
            if share:
                y, known = labels[part].clamp_min(0).unsqueeze(-1), (labels[part] >= 0).to(p.dtype)
                of_label = share * known  # 0 where there is no label
                p = p.mul_((1 - of_label).unsqueeze(-1)).scatter_add_(1, y, of_label.unsqueeze(-1))
                loss = (1 - of_label) * kl - of_label * log_q.gather(1, y).squeeze(-1)
            whole, total = whole + loss.sum(), total + kl.sum()
            grad[part] = (log_q.exp_() - p) @ weight
        ctx.save_for_backward(grad)
        ctx.n = T
        mean, mean_kl = whole / T, total / T
        ctx.mark_non_differentiable(mean_kl)
        return mean, mean_kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_kl: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * (grad_loss / ctx.n), None, None, None, None


def divergence(ours: Tensor, theirs: Tensor, weight: Tensor, tokens: Tensor, *, label_share: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss L, with λ = label_share, and KL(teacher || student), both means over all tokens, in nats.

    ours, theirs (B, N, D): the hidden states of student and teacher. weight (V, D): the unembedding. tokens (B, N) int64: the last token of
    a text has no label, and counts with its KL alone.
    """
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], dim=1)
    exact = weight.dtype
    with torch.autocast(ours.device.type, enabled=False):
        student, teacher = (x.flatten(0, 1).to(exact) for x in (ours, theirs))
        loss, kl = Divergence.apply(student, teacher, weight, labels.flatten(), label_share)  # type: ignore[no-untyped-call]
    return loss, kl


class TokenFigures(NamedTuple):
    """Figures of every token of a text, (B, N - 1): the bits of the next token, and KL(teacher || student) in nats."""

    bits: Tensor
    kl: Tensor


@torch.no_grad()
def token_figures(ours: Tensor, theirs: Tensor, weight: Tensor, tokens: Tensor) -> TokenFigures:
    """Return the figures of the tokens (B, N) of texts. The other arguments are those of `divergence`."""
    shape, exact = tokens[:, 1:].shape, weight.dtype
    student, teacher = (x[:, :-1].flatten(0, 1).to(exact) for x in (ours, theirs))
    labels = tokens[:, 1:].flatten()
    bits, kls = [], []
    with torch.autocast(ours.device.type, enabled=False):
        for begin in range(0, len(labels), CHUNK):
            part = slice(begin, begin + CHUNK)
            log_p, log_q = ((x[part] @ weight.T).log_softmax(-1) for x in (teacher, student))
            bits.append(-log_q.gather(1, labels[part].unsqueeze(-1)).squeeze(-1) / math.log(2))
            kls.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return TokenFigures(torch.cat(bits).view(shape), torch.cat(kls).view(shape))
